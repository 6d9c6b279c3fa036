use super::{QUERY_MAX_BYTES, search_index};

fn routes(query: &str) -> Vec<&'static str> {
    let index = search_index();
    index.search(query, 50).into_iter().map(|hit| hit.page.route).collect()
}

#[test]
fn pages_are_ranked() {
    assert_eq!(routes("isolation").first(), Some(&"/isolation"));
    assert_eq!(routes("How do I upgrade?").first(), Some(&"/upgrades"));
    // A key of the configuration is found as a whole.
    let hits = search_index().search("egress.allow_private", 50);
    assert!(hits.iter().take(3).any(|hit| hit.page.route == "/configuration"));
    assert!(hits.windows(2).all(|pair| pair[0].score >= pair[1].score));
}

#[test]
fn one_misspelt_letter_is_forgiven() {
    assert_eq!(routes("isolatoin").first(), Some(&"/isolation"));
}

#[test]
fn the_limit_holds_and_repeated_queries_agree() {
    let index = search_index();
    for limit in [1, 3] {
        assert_eq!(index.search("sandbox", limit).len(), limit);
    }
    assert_eq!(index.search("sandbox network", 50), index.search("sandbox network", 50));
}

#[test]
fn snippets_show_the_words_that_were_found() {
    let hits = search_index().search("wildcard certificate", 5);
    assert!(!hits.is_empty());
    for hit in hits {
        assert!(hit.snippet.len() < 1000 && !hit.snippet.contains('\n'), "{hit:?}");
        assert_eq!(hit.anchor.is_some(), !hit.headings.is_empty());
    }
}

#[test]
fn queries_without_a_match_and_hostile_ones() {
    for query in ["", " ", "???", "xyzzyplugh", "\u{0}", "\u{1F980}"] {
        assert!(routes(query).is_empty(), "{query:?}");
    }
    // Words without a meaning count where there are no others.
    assert!(!routes("how do I").is_empty());
    let index = search_index();
    for query in [
        "a".repeat(QUERY_MAX_BYTES),
        "ab ".repeat(300),
        "e2b.".repeat(256),
        "é".repeat(500),
    ] {
        let _ = index.search(&query, 50);
    }
}
