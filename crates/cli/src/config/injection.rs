//! The master key, and settings of injection rules.

use model::injection::provider::{OwnProvider, Providers};
use model::secret::Secret;
use server::settings::SigningSettings;

use super::error::{ConfigError, Source};
use super::keys;
use super::sources::Given;
use super::values::{boolean, file};
use crate::master_key::{self, KeySource, MASTER_ENV};

impl Given<'_> {
    /// Where the master key comes from.
    pub(super) fn master_key(&self) -> Result<KeySource, ConfigError> {
        let path = self.parse(keys::MASTER_KEY_FILE, file)?;
        let Some(key) = self.sources.env.get(MASTER_ENV) else {
            return Ok(path.map_or(KeySource::DataDir, KeySource::File));
        };
        if path.is_some() {
            return Err(ConfigError::Excludes {
                key: MASTER_ENV,
                other: keys::MASTER_KEY_FILE.name,
            });
        }
        if master_key::parse(key).is_none() {
            return Err(ConfigError::Value {
                key: "master key".to_owned(),
                why: "must be exactly 64 hexadecimal characters".to_owned(),
                source_of: Source::Env(MASTER_ENV.to_owned()),
            });
        }
        Ok(KeySource::Environment(Secret::new(key.clone())))
    }

    /// The built-in providers and those of the file.
    pub(super) fn providers(&self) -> Result<Providers, ConfigError> {
        let mut providers = Providers::default();
        for (name, table) in &self.file.providers {
            let invalid = |why: String| ConfigError::Value {
                key: format!("{}.{name}", keys::PROVIDER),
                why,
                source_of: Source::File(self.file.path.clone()),
            };
            let text = |key: &str| {
                let value = table.get(key).and_then(toml::Value::as_str);
                value.ok_or_else(|| invalid(format!("{key} must be a string in quotes")))
            };
            let hosts: Vec<&str> = text("host")?.split(',').map(str::trim).collect();
            let own = OwnProvider {
                name,
                hosts: &hosts,
                header: text("header")?,
                value: text("value")?,
            };
            providers.add(&own).map_err(|error| invalid(error.to_string()))?;
        }
        Ok(providers)
    }

    /// Signed requests.
    pub(super) fn signing(&self) -> Result<SigningSettings, ConfigError> {
        let default = SigningSettings::default();
        Ok(SigningSettings {
            schemes: self.parse(keys::SIGNING_SCHEMES, schemes)?.unwrap_or(default.schemes),
            require_date: self.parse(keys::SIGNING_REQUIRE_DATE, boolean)?.unwrap_or(false),
            required_for_rules: self.parse(keys::SIGNING_REQUIRED_FOR_RULES, boolean)?.unwrap_or(false),
        })
    }
}

fn schemes(text: &str) -> Result<Vec<String>, String> {
    let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
    let is_word = |word: &String| {
        (1..=32).contains(&word.len())
            && word.bytes().all(|byte| byte.is_ascii_alphanumeric())
            && !["bearer", "basic"].contains(&word.to_ascii_lowercase().as_str())
    };
    if words.iter().all(is_word) {
        return Ok(words);
    }
    Err(format!(
        "{text:?} is invalid: must be comma-separated words of letters and digits, other than Bearer and Basic"
    ))
}

#[cfg(test)]
mod tests {
    use super::schemes;

    #[test]
    fn scheme_words() {
        assert_eq!(schemes("Qiniu, Own1").unwrap(), ["Qiniu", "Own1"]);
        for bad in ["", "a,", "a b", "Bearer", "basic", "a-b", &"a".repeat(33)] {
            assert!(schemes(bad).is_err(), "{bad}");
        }
    }
}
