use std::collections::HashSet;

use super::{BASE, RenderedPages, SCRIPT, SearchResult, address};
use crate::catalogue::catalogue;

fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let mark = format!(" {name}=\"");
    html.split(&mark)
        .skip(1)
        .filter_map(|rest| rest.split('"').next())
        .collect::<Vec<_>>()
        .into_iter()
}

/// Every address in a page leads to something that is served, and every fragment to an element.
#[test]
fn no_link_is_dead() {
    let site = RenderedPages::new(catalogue());
    let elsewhere = ["/openapi.json", "/docs/search"];
    for path in site.paths() {
        let asset = site.asset(path).expect("a path of the site");
        if !asset.content_type.starts_with("text/html") {
            continue;
        }
        for picture in attributes(asset.text(), "src") {
            assert!(site.asset(picture).is_some(), "{path}: {picture} is not there");
        }
        for link in attributes(asset.text(), "href") {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            let (target, fragment) = link.split_once('#').map_or((link, None), |(path, id)| (path, Some(id)));
            let target = target.split('?').next().unwrap_or_default();
            let target = if target.is_empty() { path } else { target };
            if elsewhere.contains(&target) {
                continue;
            }
            let found = site
                .asset(target)
                .unwrap_or_else(|| panic!("{path}: {link} leads nowhere"));
            if let Some(id) = fragment {
                let ids: HashSet<_> = attributes(found.text(), "id").collect();
                assert!(ids.contains(id), "{path}: {link} leads to no heading");
            }
        }
    }
}

/// What readers of the product cannot follow is named here, so that a page does not lose a link by a mistyped name.
#[test]
fn links_that_are_not_served_lead_to_files_of_developers() {
    for page in catalogue().pages() {
        for link in page.body.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let is_served = super::markdown::target(page, link, catalogue()).is_some()
                || super::markdown::picture(page, link, catalogue()).is_some();
            let is_for_developers = [
                "../CHANGELOG.md",
                "../CONTRIBUTING.md",
                "../SPECIFICATION.md",
                "../SECURITY.md",
                "dev/",
            ]
            .iter()
            .any(|file| link.trim_start_matches("../..").starts_with(file));
            assert!(is_served || is_for_developers, "{}: {link}", page.file);
        }
    }
}

#[test]
fn identifiers_are_unique() {
    let site = RenderedPages::new(catalogue());
    for page in catalogue().pages() {
        let asset = site.asset(&address(page)).expect("a page");
        let mut seen = HashSet::new();
        for id in attributes(asset.text(), "id") {
            assert!(seen.insert(id), "{}: {id}", page.route);
        }
    }
}

#[test]
fn pages_need_nothing_else_and_run_one_script() {
    let site = RenderedPages::new(catalogue());
    for page in catalogue().pages() {
        let whole = site.asset(&address(page)).expect("a page").text();
        let script = format!("<script>{SCRIPT}</script>");
        assert_eq!(
            whole.matches(&script).count(),
            usize::from(whole.contains("<pre>")),
            "{}",
            page.route
        );
        // Pictures come from the same address.
        let body = whole.replace(&script, "").replace(" src=\"/docs/pictures/", "");
        for forbidden in ["<script", "style=\"", " src=\"", "@import"] {
            assert!(!body.contains(forbidden), "{}: {forbidden}", page.route);
        }
        assert_eq!(body.matches("<h1").count(), 1, "{}", page.route);
        assert_eq!(body.matches("<main").count(), 1, "{}", page.route);
    }
}

#[test]
fn the_script_cannot_end_early_or_write_markup() {
    for forbidden in ["</", "<!--", "innerHTML", "eval", "Function", "fetch"] {
        assert!(!SCRIPT.contains(forbidden), "{forbidden}");
    }
}

/// Every configuration key can be linked, and the contents name every group once.
#[test]
fn keys_and_groups() {
    let site = RenderedPages::new(catalogue());
    let body = site.asset("/docs/configuration").expect("a page").text();
    for key in ["listen", "egress.allow_private", "sandbox.memory_mb"] {
        assert!(body.contains(&format!("<td id=\"{key}\" ")), "{key}");
    }
    let found: Vec<&str> = body
        .split("<span class=\"group\">")
        .skip(1)
        .filter_map(|rest| rest.split('<').next())
        .collect();
    // Once for wide screens and once for narrow ones.
    assert_eq!(found, [crate::source::GROUPS, crate::source::GROUPS].concat());
}

#[test]
fn results_are_escaped() {
    let site = RenderedPages::new(catalogue());
    let result = SearchResult {
        page: &catalogue().pages()[0],
        headings: vec!["<b>".to_owned()],
        anchor: Some("x\"y".to_owned()),
        snippet: "<i>".to_owned(),
    };
    let shown = site.results("\"><script>", &[result], Some("<u>"));
    let body = shown.text();
    assert!(
        !body.contains("<script") && !body.contains("<b>") && !body.contains("<i>") && !body.contains("<u>"),
        "{body}"
    );
    assert!(!body.contains("x\"y"), "{body}");
    assert!(body.contains("1 page matches"), "{body}");
    assert!(site.results("x", &[], None).text().contains("No page answers “x”."));
    assert!(
        site.results("x", &[], Some("No page mentions “x”."))
            .text()
            .contains("No page mentions “x”.")
    );
    assert!(site.results("", &[], None).text().contains("Enter some words"));
}

#[test]
fn texts_for_agents_have_every_page() {
    let site = RenderedPages::new(catalogue());
    let list = site.asset("/llms.txt").expect("a list").text();
    let full = site.asset("/llms-full.txt").expect("a text").text();
    assert!(list.starts_with("# Ringfence\n\n> "));
    for page in catalogue().pages() {
        assert!(
            list.contains(&format!("({BASE}{}): {}", page.file, page.description)),
            "{}",
            page.file
        );
        assert!(full.contains(page.body), "{}", page.file);
        assert!(site.asset(&format!("{BASE}{}", page.file)).is_some(), "{}", page.file);
    }
}

#[test]
fn equal_content_has_an_equal_tag() {
    let (one, other) = (RenderedPages::new(catalogue()), RenderedPages::new(catalogue()));
    for path in one.paths() {
        assert_eq!(one.asset(path), other.asset(path));
    }
    let tags: HashSet<_> = catalogue()
        .pages()
        .iter()
        .map(|page| &one.asset(&address(page)).expect("a page").etag)
        .collect();
    assert_eq!(tags.len(), catalogue().pages().len());
}
