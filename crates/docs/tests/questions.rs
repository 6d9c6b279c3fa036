//! The questions of people are answered by the first three results of a search, and what no page mentions is said.

use docs::{catalogue, search_index};
use serde::Deserialize;

/// Results among which an answer must be.
const FIRST: usize = 3;

#[derive(Deserialize)]
struct Questions {
    question: Vec<Question>,
    unanswered: Vec<Unanswered>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    text: String,
    /// The pages that answer the question.
    routes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unanswered {
    text: String,
    /// Words that no page has.
    missing: Vec<String>,
}

fn questions() -> Questions {
    toml::from_str(include_str!("../../../conformance/mcp/questions.toml")).expect("the questions")
}

#[test]
fn the_first_results_answer_what_people_ask() {
    let mut unanswered = Vec::new();
    for Question { text, routes } in questions().question {
        assert!(!routes.is_empty(), "no page answers {text:?}");
        for route in &routes {
            assert!(catalogue().page(route).is_some(), "{route} is not a page: {text:?}");
        }
        let answer = search_index().search(&text, FIRST);
        let hits: Vec<&str> = answer.hits.iter().map(|hit| hit.page.route).collect();
        if !hits.iter().any(|hit| routes.iter().any(|route| route == hit)) {
            unanswered.push(format!(
                "{text:?}: expected one of {routes:?}, found {hits:?} {:?}",
                answer.missing
            ));
        }
    }
    assert!(unanswered.is_empty(), "{}", unanswered.join("\n"));
}

#[test]
fn what_no_page_mentions_is_said() {
    let mut noise = Vec::new();
    for Unanswered { text, missing } in questions().unanswered {
        let answer = search_index().search(&text, FIRST);
        let note = answer.note().unwrap_or_default();
        let is_said = missing.iter().all(|word| note.contains(&format!("“{word}”")));
        if !answer.hits.is_empty() || !is_said || !note.starts_with("No page mentions ") {
            let hits: Vec<&str> = answer.hits.iter().map(|hit| hit.page.route).collect();
            noise.push(format!("{text:?}: found {hits:?}, said {note:?}"));
        }
    }
    assert!(noise.is_empty(), "{}", noise.join("\n"));
}
