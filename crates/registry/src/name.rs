//! The parts of names of images and artifacts, as the specification of OCI has them. Whoever uses them says what stands for a part
//! that is missing.

use anyhow::{Result, ensure};

/// Maximum length of the path of a repository.
const REPOSITORY_MAX: usize = 255;
/// Maximum length of a tag.
const TAG_MAX: usize = 128;

/// Refuses what is not `host`, `host:port`, an address, or an IPv6 address in brackets.
///
/// # Errors
/// With what is wrong.
pub fn check_host(text: &str) -> Result<()> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            ensure!(address.parse::<std::net::Ipv6Addr>().is_ok(), "invalid host {text:?}");
            (None, rest.strip_prefix(':').or((!rest.is_empty()).then_some("")))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (Some(host), Some(port)),
            None => (Some(text), None),
        },
    };
    if let Some(host) = host {
        let is_label = |label: &str| {
            !label.is_empty()
                && label.len() <= 63
                && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        ensure!(
            host.len() <= 253 && host.split('.').all(is_label),
            "invalid host {text:?}"
        );
    }
    if let Some(port) = port {
        let is_port = port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
        ensure!(is_port, "invalid port in {text:?}");
    }
    Ok(())
}

/// Refuses what is not the path of a repository.
///
/// # Errors
/// With what is wrong.
pub fn check_repository(path: &str) -> Result<()> {
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_component = |component: &str| {
        // Between letters and digits: one dot, one or two underscores, or hyphens.
        let separators = component
            .split(is_alphanumeric)
            .filter(|separator| !separator.is_empty());
        let is_separator = |text: &str| matches!(text, "." | "_" | "__") || text.chars().all(|c| c == '-');
        component.starts_with(is_alphanumeric)
            && component.ends_with(is_alphanumeric)
            && separators.into_iter().all(is_separator)
    };
    ensure!(
        path.len() <= REPOSITORY_MAX,
        "invalid repository: longer than {REPOSITORY_MAX} characters"
    );
    ensure!(
        path.split('/').all(is_component),
        "invalid repository: expected lower-case letters, digits and separators, such as owner/name:tag"
    );
    Ok(())
}

/// Refuses what is not a tag.
///
/// # Errors
/// With what is wrong.
pub fn check_tag(tag: &str) -> Result<()> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_tag =
        tag.len() <= TAG_MAX && tag.starts_with(is_word) && tag.chars().all(|c| is_word(c) || matches!(c, '.' | '-'));
    ensure!(
        is_tag,
        "invalid tag: expected at most {TAG_MAX} letters, digits and separators"
    );
    Ok(())
}

/// Whether a text is a SHA-256 digest, the only kind that every registry supports.
#[must_use]
pub fn is_digest(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
