//! Paths and names that are not trusted, as they appear in messages.

/// A path for messages: at most 200 characters, control characters escaped.
pub(crate) fn show(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let mut shown: String = text.chars().take(200).flat_map(char::escape_debug).collect();
    if text.chars().nth(200).is_some() {
        shown.push('…');
    }
    shown
}
