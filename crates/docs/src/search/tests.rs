use super::{QUERY_MAX_BYTES, search_index};

fn routes(query: &str) -> Vec<&'static str> {
    let index = search_index();
    index
        .search(query, 50)
        .hits
        .into_iter()
        .map(|hit| hit.page.route)
        .collect()
}

#[test]
fn pages_are_ranked() {
    assert_eq!(routes("isolation").first(), Some(&"/isolation"));
    assert_eq!(routes("How do I upgrade?").first(), Some(&"/upgrades"));
    // A page with the very title comes first, and guides before the reference.
    for (query, route) in [
        ("network", "/network"),
        ("templates", "/templates"),
        ("secrets", "/secrets"),
    ] {
        assert_eq!(routes(query).first(), Some(&route));
    }
    // A key of the configuration is found as a whole.
    let hits = search_index().search("egress.allow_private", 50).hits;
    assert!(hits.iter().take(3).any(|hit| hit.page.route == "/configuration"));
    assert!(hits.windows(2).all(|pair| pair[0].score >= pair[1].score));
}

#[test]
fn one_misspelt_letter_is_forgiven() {
    assert_eq!(routes("isolatoin").first(), Some(&"/isolation"));
}

#[test]
fn a_word_that_no_page_has_is_said() {
    let index = search_index();
    let answer = index.search("isolatoin", 5);
    let note = answer.note().expect("a note");
    assert!(
        note.starts_with("No page mentions “isolatoin”. These match “isolation”"),
        "{note}"
    );
    let answer = index.search("a sandbox with terraform", 5);
    assert!(answer.hits.is_empty());
    assert_eq!(answer.note().as_deref(), Some("No page mentions “terraform”."));
    let answer = index.search("wildcard certificate terraform", 5);
    let note = answer.note().expect("a note");
    assert_eq!(answer.hits[0].page.route, "/tls");
    assert_eq!(note, "No page mentions “terraform”. These match the other words.");
    assert_eq!(index.search("network", 5).note(), None);
    // Whatever is echoed is short.
    let words: String = (b'b'..b'z')
        .map(|letter| format!("{}q ", char::from(letter).to_string().repeat(60)))
        .collect();
    assert!(index.search(&words, 5).note().expect("a note").len() < 300);
}

/// Short words are not taken for others that differ by a letter.
#[test]
fn a_short_word_is_not_misspelt() {
    for query in ["helk", "spork"] {
        assert!(search_index().search(query, 5).hits.is_empty(), "{query}");
    }
}

#[test]
fn the_limit_holds_and_repeated_queries_agree() {
    let index = search_index();
    for limit in [1, 3] {
        assert_eq!(index.search("sandbox", limit).hits.len(), limit);
    }
    assert_eq!(index.search("sandbox network", 50), index.search("sandbox network", 50));
}

#[test]
fn snippets_show_the_words_that_were_found() {
    let hits = search_index().search("wildcard certificate", 5).hits;
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
