//! Headers with the name and the media type of a file.

use std::path::Path;

/// The media type of any other file.
pub(super) const BINARY: &str = "application/octet-stream";

/// The media type of a file: by its extension, else by whether its beginning is text.
pub(super) fn of(path: &Path, beginning: &[u8]) -> &'static str {
    by_extension(path).unwrap_or_else(|| {
        if is_text(&beginning[..beginning.len().min(512)]) {
            "text/plain; charset=utf-8"
        } else {
            BINARY
        }
    })
}

/// The media type of a file by its extension, if that is known.
pub(super) fn by_extension(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?.to_str()?;
    Some(match extension.to_ascii_lowercase().as_str() {
        "avif" => "image/avif",
        "css" => "text/css; charset=utf-8",
        "gif" => "image/gif",
        "htm" | "html" => "text/html; charset=utf-8",
        "jpeg" | "jpg" => "image/jpeg",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "pdf" => "application/pdf",
        "png" => "image/png",
        "svg" => "image/svg+xml",
        "txt" => "text/plain; charset=utf-8",
        "wasm" => "application/wasm",
        "webp" => "image/webp",
        "xml" => "text/xml; charset=utf-8",
        _ => return None,
    })
}

fn is_text(bytes: &[u8]) -> bool {
    let text = match std::str::from_utf8(bytes) {
        Ok(_) => bytes,
        // A character cut at the end is no reason to doubt the rest.
        Err(error) if error.error_len().is_none() => &bytes[..error.valid_up_to()],
        Err(_) => return false,
    };
    !text.iter().any(|byte| matches!(byte, 0..=8 | 11 | 14..=26 | 28..=31))
}

/// The value of `Content-Disposition` under which a browser shows the file and saves it by its name.
pub(super) fn disposition(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_token) {
        return format!("inline; filename={name}");
    }
    if name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        let quoted = name.replace('\\', "\\\\").replace('"', "\\\"");
        return format!("inline; filename=\"{quoted}\"");
    }
    let mut value = "inline; filename*=utf-8''".to_owned();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&byte) {
            value.push(char::from(byte));
        } else {
            value.push_str(&format!("%{byte:02X}"));
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types() {
        let check = |path: &str, beginning: &[u8], expect: &str| assert_eq!(of(Path::new(path), beginning), expect);
        check("/a.JSON", b"\0", "application/json");
        check("/a", "grüße".as_bytes(), "text/plain; charset=utf-8");
        check("/a", &"ü".as_bytes()[..1], "text/plain; charset=utf-8");
        check("/a", b"", "text/plain; charset=utf-8");
        check("/a", b"a\0", "application/octet-stream");
        check("/a", b"\xff\xfe", "application/octet-stream");
    }

    #[test]
    fn names() {
        let check = |path: &str, expect: &str| assert_eq!(disposition(Path::new(path)), expect);
        check("/x/a.txt", "inline; filename=a.txt");
        check("/x/a b\".txt", "inline; filename=\"a b\\\".txt\"");
        check("/x/ü\n.txt", "inline; filename*=utf-8''%C3%BC%0A.txt");
    }
}
