//! Texts in the query of a request.

/// A text in a query.
pub(super) fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let encode = |byte| {
        if plain(byte) {
            char::from(byte).to_string()
        } else {
            format!("%{byte:02X}")
        }
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_query_are_encoded() {
        assert_eq!(encoded("my-template_1:v1.0"), "my-template_1%3Av1.0");
        assert_eq!(encoded("a&team=b é"), "a%26team%3Db%20%C3%A9");
    }
}
