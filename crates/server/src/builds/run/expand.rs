//! Variables in the values of ENV steps.
//!
//! `$NAME` and `${NAME}` become the value of the variable, or nothing if there is none. `\$` is a dollar sign; every
//! other character stands for itself. In particular `$(command)` and backticks stay as they are: no step runs a command
//! but RUN.

use std::collections::BTreeMap;

/// What a login shell of root has in any image.
const DEFAULTS: [(&str, &str); 2] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
];

/// Maximum length of a value, in bytes: what the kernel takes as one variable of a program.
const VALUE_MAX: usize = 128 << 10;

/// The value with its variables replaced by those of `env`; none if it becomes too long.
pub(super) fn expand(value: &str, env: &BTreeMap<String, String>) -> Option<String> {
    let mut expanded = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find(['$', '\\']) {
        if expanded.len() > VALUE_MAX {
            return None;
        }
        expanded.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix("\\$") {
            expanded.push('$');
            rest = after;
        } else if let Some((name, after)) = variable(rest) {
            expanded.push_str(lookup(name, env));
            rest = after;
        } else {
            expanded.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    expanded.push_str(rest);
    (expanded.len() <= VALUE_MAX).then_some(expanded)
}

/// The name of the variable at the beginning of a text, and what follows it.
fn variable(text: &str) -> Option<(&str, &str)> {
    let after = text.strip_prefix('$')?;
    let (inner, is_braced) = match after.strip_prefix('{') {
        Some(inner) => (inner, true),
        None => (after, false),
    };
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let length = inner.find(|c| !is_part(c)).unwrap_or(inner.len());
    let (name, after) = inner.split_at(length);
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if is_braced {
        Some((name, after.strip_prefix('}')?))
    } else {
        Some((name, after))
    }
}

fn lookup<'a>(name: &str, env: &'a BTreeMap<String, String>) -> &'a str {
    let default = || {
        DEFAULTS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| *value)
    };
    env.get(name).map(String::as_str).or_else(default).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_and_commands_are_not_run() {
        let env = BTreeMap::from([
            ("A".to_owned(), "one".to_owned()),
            ("A_B2".to_owned(), "two".to_owned()),
        ]);
        for (value, want) in [
            ("", ""),
            ("plain", "plain"),
            ("$A", "one"),
            ("${A}x", "onex"),
            ("$A_B2", "two"),
            ("$A-$A", "one-one"),
            (
                "/opt:$PATH",
                "/opt:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            ),
            ("$HOME/x", "/root/x"),
            ("$NONE.", "."),
            ("\\$A", "$A"),
            ("\\\\", "\\\\"),
            ("a\\nb", "a\\nb"),
            ("$(id) `id`", "$(id) `id`"),
            ("${A", "${A"),
            ("${}", "${}"),
            ("${A:-x}", "${A:-x}"),
            ("$1 $ $", "$1 $ $"),
            ("\"q\" 'q'\nb", "\"q\" 'q'\nb"),
            ("é$A", "éone"),
            ("$é", "$é"),
        ] {
            assert_eq!(expand(value, &env).as_deref(), Some(want), "{value}");
        }
    }

    #[test]
    fn values_of_variables_are_not_expanded_again() {
        let env = BTreeMap::from([("A".to_owned(), "$A$A".to_owned())]);
        assert_eq!(expand("$A", &env).as_deref(), Some("$A$A"));
    }

    #[test]
    fn values_do_not_grow_without_end() {
        let env = BTreeMap::from([("A".to_owned(), "x".repeat(VALUE_MAX))]);
        assert_eq!(expand("$A", &env).map(|value| value.len()), Some(VALUE_MAX));
        assert_eq!(expand("$A.", &env), None);
        assert_eq!(expand(&"$A".repeat(60_000), &env), None);
    }
}
