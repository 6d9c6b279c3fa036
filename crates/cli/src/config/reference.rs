//! The reference of all keys, as the help text shows it.

use std::fmt::Write as _;

use super::keys;
use super::teams::PER_TEAM;

/// The reference of all keys, shown at the end of the help text.
pub(crate) fn reference() -> String {
    let mut text = String::from(
        "Keys of the configuration file (TOML; a dot separates table and key) and their environment variables.\n\
         Precedence: flag, environment, file, default.\n",
    );
    for key in keys::ALL {
        let _ = write!(
            text,
            "\n  {} [env: {}] [default: {}]\n",
            key.name,
            key.env(),
            key.default
        );
        for line in wrap(key.meaning, 100) {
            let _ = writeln!(text, "      {line}");
        }
    }
    text.push_str("\nKeys that can be set per team, in the file only, as team.<name>.<key>:\n");
    for key in PER_TEAM {
        let _ = writeln!(text, "  {}", key.name);
    }
    text.push_str(
        "\nProviders of injections, in the file only: a table provider.<type> with host, header and value, which ends \
         with {key}.\n",
    );
    text.push_str("\nExit codes: 0 success, 1 failure, 2 usage or configuration error.");
    text
}

/// Breaks a text at spaces into lines of at most `width` characters.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}
