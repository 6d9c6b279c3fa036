//! Names of templates.

/// Maximum length of the namespace of a team, in characters, without what tells two of one name apart.
const SLUG_MAX: usize = 63;

/// The namespace of a team with this name: its letters and digits in lower case, joined with dashes. What follows an
/// `@` is left out.
#[must_use]
pub fn slug(team: &str) -> String {
    let name = team.split('@').next().unwrap_or_default();
    let mut slug = String::new();
    for word in name.split(|c: char| !c.is_ascii_alphanumeric()) {
        if word.is_empty() {
            continue;
        }
        if !slug.is_empty() {
            slug.push('-');
        }
        slug.push_str(&word.to_ascii_lowercase());
    }
    slug.truncate(SLUG_MAX);
    if slug.is_empty() { "team".to_owned() } else { slug }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_words_joined_with_dashes() {
        for (team, want) in [
            ("default", "default"),
            ("Team 1", "team-1"),
            ("  a__b  ", "a-b"),
            ("jo.doe@example.org", "jo-doe"),
            ("é", "team"),
            ("", "team"),
            ("@x", "team"),
        ] {
            assert_eq!(slug(team), want, "{team}");
        }
        assert_eq!(slug(&"a".repeat(500)).len(), SLUG_MAX);
    }
}
