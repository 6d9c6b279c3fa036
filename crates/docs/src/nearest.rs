//! Suggestions for names that do not exist.

use crate::catalogue::catalogue;

/// Names that are suggested at most.
const MOST: usize = 3;
/// Longest name that is compared, in bytes: the cost is the product of both lengths.
const COMPARED_MAX: usize = 128;

/// The routes of pages that are most like one that does not exist, best first.
#[must_use]
pub fn nearest_routes(route: &str) -> Vec<&'static str> {
    nearest(route, catalogue().pages().iter().map(|page| page.route))
}

/// The known names that are most like another one, best first; none if none is like it.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    if name.len() > COMPARED_MAX {
        return Vec::new();
    }
    let last = |path: &str| {
        path.rsplit('/')
            .next()
            .unwrap_or_default()
            .trim_end_matches(".md")
            .to_lowercase()
    };
    let (stem, wanted) = (name.trim_end_matches(".md").to_lowercase(), last(name));
    let mut found: Vec<(usize, &str)> = known
        .filter_map(|other| {
            let other_stem = other.trim_end_matches(".md").to_lowercase();
            let distance = if other_stem == stem {
                0
            } else if !wanted.is_empty() && last(other) == wanted {
                1
            } else {
                let distance = strsim::levenshtein(&stem, &other_stem);
                (distance <= stem.len() / 3).then_some(distance + 1)?
            };
            Some((distance, other))
        })
        .collect();
    found.sort_unstable();
    found.into_iter().take(MOST).map(|(_, other)| other).collect()
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn distances() {
        for (one, other, distance) in [("", "", 0), ("a", "", 1), ("kitten", "sitting", 3), ("ab", "ba", 2)] {
            assert_eq!(strsim::levenshtein(one, other), distance);
        }
    }

    #[test]
    fn suggestions() {
        let known = || ["/network", "/sandbox/network", "/configuration", "/"].into_iter();
        assert_eq!(nearest("/configration", known()), ["/configuration"]);
        assert_eq!(nearest("/network.md", known()), ["/network", "/sandbox/network"]);
        assert_eq!(nearest("/somewhere", known()), [""; 0]);
        assert_eq!(nearest(&"/".repeat(10_000), known()), [""; 0]);
    }
}
