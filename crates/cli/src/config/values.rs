//! Values of configuration keys, as texts. Errors say what is expected.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use link::Address;
use model::network::domain_name;
use runtime::settings::CriuChoice;
use server::settings::{Network, PauseAnswer};

/// The upper limit of a number that has none of its own.
pub(super) const MAX: u32 = u32::MAX;
/// Fewest files that processes of sandboxes may be limited to: fewer than that are not enough for ordinary programs.
pub(super) const OPEN_FILES_MIN: u32 = 64;
/// Maximum of the webhooks of a team: each of its events is sent as often.
pub(super) const WEBHOOKS_MAX: u32 = 1000;
/// Longest pause before the second attempt to send an event, in seconds.
pub(super) const WEBHOOKS_RETRY_MAX_S: u32 = 600;
/// How many servers a node can connect to at most: it tries one after the other.
const SERVERS_MAX: usize = 16;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

pub(super) fn directory(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("must not be empty".to_owned());
    }
    // Line breaks and quotes would break the credentials file and the command line that loads it.
    if text.contains(|c: char| c.is_control() || c == '\'') {
        return Err(format!("{text:?} contains a quote or a control character"));
    }
    std::path::absolute(text).map_err(|error| error.to_string())
}

pub(super) fn file(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("must not be empty".to_owned());
    }
    std::path::absolute(text).map_err(|error| error.to_string())
}

/// Which CRIU is used. A word without a slash is no path, so that none is looked up in the current directory by mistake.
pub(super) fn criu(text: &str) -> Result<CriuChoice, String> {
    match text {
        "auto" => Ok(CriuChoice::Auto),
        "off" => Ok(CriuChoice::Off),
        path if path.contains('/') => file(path).map(CriuChoice::At),
        _ => Err(format!("{text:?} is invalid: must be auto, off or the path of CRIU")),
    }
}

pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric
        .parse()
        .map_err(|_| format!("{text:?} is not an address with a port, such as 127.0.0.1:3000 or [::]:3000"))
}

/// Reads the address of a server's port of nodes.
pub(super) fn server_address(text: &str) -> Result<Address, String> {
    text.trim().parse()
}

/// Reads the addresses of servers.
pub(super) fn server_addresses(text: &str) -> Result<Vec<Address>, String> {
    let addresses: Vec<Address> = text.split(',').map(server_address).collect::<Result<_, _>>()?;
    if addresses.len() > SERVERS_MAX {
        return Err(format!(
            "{} addresses are too many: at most {SERVERS_MAX}",
            addresses.len()
        ));
    }
    Ok(addresses)
}

pub(super) fn domain(text: &str) -> Result<String, String> {
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    // 253 is the limit of DNS; a sandbox's label and a dot (62 + 7 characters at most) come in front.
    let labels_fit = name.len() <= 253 - 70 && name.split('.').all(|label| (1..=63).contains(&label.len()));
    let letters_fit = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.');
    if !labels_fit || !letters_fit {
        return Err(format!("{text:?} is not a domain name, such as sandbox.example.com"));
    }
    if port.is_some_and(|port| !port.parse::<u16>().is_ok_and(|port| port > 0)) {
        return Err(format!("{text:?} does not end in a valid port"));
    }
    Ok(text.to_ascii_lowercase())
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(format!("{text:?} is invalid: must be text or json")),
    }
}

pub(super) fn pause_answer(text: &str) -> Result<PauseAnswer, String> {
    match text {
        "durable" => Ok(PauseAnswer::Durable),
        "frozen" => Ok(PauseAnswer::Frozen),
        _ => Err(format!("{text:?} is invalid: must be durable or frozen")),
    }
}

/// Whether the whole disk of a sandbox is allocated at its start.
pub(super) fn disk_reserve(text: &str) -> Result<bool, String> {
    match text {
        "none" => Ok(false),
        "full" => Ok(true),
        _ => Err(format!("{text:?} is invalid: must be none or full")),
    }
}

pub(super) fn log_level(text: &str) -> Result<String, String> {
    // Without an equals sign a word is a level; the filter would silently accept a misspelt one as a module name.
    for directive in text.split(',') {
        let level = directive
            .rsplit('=')
            .next()
            .unwrap_or(directive)
            .trim()
            .to_ascii_lowercase();
        if !["off", "error", "warn", "info", "debug", "trace"].contains(&level.as_str()) {
            return Err(format!(
                "{directive:?} is not a log level: error, warn, info, debug or trace"
            ));
        }
    }
    tracing_subscriber::EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

/// Reads a value that has no default.
pub(super) fn some<T>(read: impl Fn(&str) -> Result<T, String>) -> impl Fn(&str) -> Result<Option<T>, String> {
    move |text| read(text).map(Some)
}

/// Reads a number in these bounds.
pub(super) fn number(min: u32, max: u32) -> impl Fn(&str) -> Result<u32, String> {
    move |text| integer(text, min, max)
}

/// Reads how many there may be of something.
pub(super) fn count(min: u32, max: u32) -> impl Fn(&str) -> Result<usize, String> {
    move |text| integer(text, min, max).map(|count| count as usize)
}

/// Reads a size in KiB, as bytes.
pub(super) fn kib(min: u32, max: u32) -> impl Fn(&str) -> Result<u64, String> {
    move |text| integer(text, min, max).map(|size| u64::from(size) << 10)
}

/// Reads a size in MiB, as bytes.
pub(super) fn mib(min: u32) -> impl Fn(&str) -> Result<u64, String> {
    move |text| integer(text, min, u32::MAX).map(|size| u64::from(size) << 20)
}

/// Reads a limit; 0 is none.
pub(super) fn limit(max: u32) -> impl Fn(&str) -> Result<Option<u32>, String> {
    move |text| integer(text, 0, max).map(|number| (number > 0).then_some(number))
}

pub(super) fn integer(text: &str, min: u32, max: u32) -> Result<u32, String> {
    let number: i64 = text.trim().parse().map_err(|_| format!("{text:?} is not an integer"))?;
    match u32::try_from(number) {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ if max == u32::MAX => Err(format!("{number} is too small: must be at least {min}")),
        _ => Err(format!("{number} is out of range: must be between {min} and {max}")),
    }
}

pub(super) fn networks(text: &str) -> Result<Vec<Network>, String> {
    text.split(',')
        .map(|part| part.trim().parse().map_err(|error| format!("{error}")))
        .collect()
}

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(format!("{text:?} is invalid: must be true or false")),
    }
}

/// Reads a number of seconds.
pub(super) fn seconds(min: u32, max: u32) -> impl Fn(&str) -> Result<Duration, String> {
    move |text| integer(text, min, max).map(|seconds| Duration::from_secs(u64::from(seconds)))
}

/// Names of hosts, without ports.
pub(super) fn host_names(text: &str) -> Result<Vec<String>, String> {
    let name = |part: &str| {
        let part = part.trim();
        domain_name(part)
            .ok_or_else(|| format!("{part:?} is invalid: must be comma-separated names such as hooks.example.com"))
    };
    text.split(',').map(name).collect()
}

/// The words that announce a signed request.
pub(super) fn schemes(text: &str) -> Result<Vec<String>, String> {
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
    use super::{SERVERS_MAX, schemes, server_addresses};

    #[test]
    fn addresses_of_servers() {
        let read = server_addresses("https://a:1, https://[::1]:2").unwrap();
        assert_eq!(read.len(), 2);
        let many = vec!["https://a:1"; SERVERS_MAX + 1].join(",");
        for bad in ["", "a:1", "https://a:1,", &many] {
            assert!(server_addresses(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn scheme_words() {
        assert_eq!(schemes("Qiniu, Own1").unwrap(), ["Qiniu", "Own1"]);
        for bad in ["", "a,", "a b", "Bearer", "basic", "a-b", &"a".repeat(33)] {
            assert!(schemes(bad).is_err(), "{bad}");
        }
    }
}
