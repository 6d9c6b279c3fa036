//! Values of the keys of the documentation endpoint.

/// Longest path, in bytes.
const PATH_MAX: usize = 256;
/// Longest suffix of tool names: clients accept names of 64 characters.
const SUFFIX_MAX: usize = 32;

/// A path of the API has no such end, so they cannot collide.
pub(super) fn path(text: &str) -> Result<String, String> {
    let is_plain = |segment: &str| {
        let mut bytes = segment.bytes();
        !segment.is_empty()
            && segment != "."
            && segment != ".."
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
    };
    let mut segments = text.strip_prefix('/').unwrap_or_default().split('/');
    if text.len() <= PATH_MAX && text.ends_with("/mcp") && segments.all(is_plain) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{text:?} is not a path such as /mcp or /documentation/mcp: it must end with /mcp and have at most {PATH_MAX} bytes"
    ))
}

pub(super) fn suffix(text: &str) -> Result<String, String> {
    let mut bytes = text.bytes();
    if (1..=SUFFIX_MAX).contains(&text.len()) && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{text:?} is invalid: must be 1 to {SUFFIX_MAX} letters, digits, `-` and `_`"
    ))
}

#[cfg(test)]
mod tests {
    use super::{path, suffix};

    #[test]
    fn paths() {
        for good in [
            "/mcp",
            "/documentation/mcp",
            "/a-b._~/C/mcp",
            &format!("/{}/mcp", "a".repeat(251)),
        ] {
            assert_eq!(path(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "mcp",
            "/",
            "/docs",
            "/mcp/",
            "//mcp",
            "/a b/mcp",
            "/{x}/mcp",
            "/xmcp",
            "/é/mcp",
            "/mcp?x=/mcp",
            "/../mcp",
        ] {
            assert!(path(bad).is_err(), "{bad}");
        }
        assert!(path(&format!("/{}/mcp", "a".repeat(252))).is_err());
    }

    #[test]
    fn suffixes() {
        for good in ["svc", "a", "A-1_b", &"a".repeat(32)] {
            assert_eq!(suffix(good).as_deref(), Ok(good));
        }
        for bad in ["", "a b", "é", "a.b", &"a".repeat(33)] {
            assert!(suffix(bad).is_err(), "{bad}");
        }
    }
}
