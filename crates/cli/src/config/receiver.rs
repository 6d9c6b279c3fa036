//! The keys of traces and of the export of metrics, which depend on each other.

use server::settings::Endpoint;

use super::error::ConfigError;
use super::keys;
use super::sources::Given;
use super::telemetry::TelemetryConfig;
use super::values::file;

impl Given<'_> {
    /// Where traces and metrics are sent; none if they are not.
    pub(super) fn telemetry(&self) -> Result<Option<TelemetryConfig>, ConfigError> {
        let endpoint = self.parse(keys::TELEMETRY_OTLP_ENDPOINT, Endpoint::parse)?;
        let headers_file = self.parse(keys::TELEMETRY_OTLP_HEADERS_FILE, file)?;
        let ca_file = self.parse(keys::TELEMETRY_CA_FILE, file)?;
        let sampling_ratio = self.parse(keys::TELEMETRY_SAMPLING_RATIO, ratio)?;
        let Some(endpoint) = endpoint else {
            let alone = [
                (headers_file.is_some(), keys::TELEMETRY_OTLP_HEADERS_FILE),
                (ca_file.is_some(), keys::TELEMETRY_CA_FILE),
                (sampling_ratio.is_some(), keys::TELEMETRY_SAMPLING_RATIO),
            ];
            return match alone.into_iter().find(|(is_given, _)| *is_given) {
                Some((_, key)) => Err(ConfigError::Requires {
                    key: key.name,
                    other: keys::TELEMETRY_OTLP_ENDPOINT.name,
                }),
                None => Ok(None),
            };
        };
        if headers_file.is_some() && endpoint.is_exposed() {
            return Err(ConfigError::Requires {
                key: keys::TELEMETRY_OTLP_HEADERS_FILE.name,
                other: "telemetry.otlp_endpoint with https:// or on this host, because the network reads them otherwise",
            });
        }
        Ok(Some(TelemetryConfig {
            endpoint,
            headers_file,
            ca_file,
            sampling_ratio: sampling_ratio.unwrap_or(1.0),
        }))
    }
}

/// A part of all, from 0 to 1.
fn ratio(text: &str) -> Result<f64, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let ratio = text.parse::<f64>().ok().filter(|ratio| is_plain && *ratio <= 1.0);
    ratio.ok_or_else(|| format!("{text:?} is invalid: must be a number from 0 to 1, such as 0.1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_parts_of_all() {
        for (text, want) in [("0", 0.0), ("1", 1.0), ("0.01", 0.01), ("1.0", 1.0), (".5", 0.5)] {
            assert_eq!(ratio(text), Ok(want));
        }
        for text in ["", ".", "-0.1", "1.1", "NaN", "inf", "1e-3", "10%", "0,1"] {
            assert!(ratio(text).is_err(), "{text}");
        }
    }
}
