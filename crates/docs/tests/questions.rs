//! The questions of a newcomer are answered by the first three results of a search.

use docs::{catalogue, search_index};
use serde::Deserialize;

/// Results among which an answer must be.
const FIRST: usize = 3;

#[derive(Deserialize)]
struct Questions {
    question: Vec<Question>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    text: String,
    /// The pages that answer it.
    routes: Vec<String>,
}

#[test]
fn the_first_results_answer_the_questions_of_a_newcomer() {
    let questions: Questions =
        toml::from_str(include_str!("../../../conformance/mcp/questions.toml")).expect("the questions");
    assert_eq!(questions.question.len(), 20);
    let mut unanswered = Vec::new();
    for Question { text, routes } in questions.question {
        assert!(!routes.is_empty(), "no page answers {text:?}");
        for route in &routes {
            assert!(catalogue().page(route).is_some(), "{route} is not a page: {text:?}");
        }
        let hits: Vec<&str> = search_index()
            .search(&text, FIRST)
            .iter()
            .map(|hit| hit.page.route)
            .collect();
        if !hits.iter().any(|hit| routes.iter().any(|route| route == hit)) {
            unanswered.push(format!("{text:?}: expected one of {routes:?}, found {hits:?}"));
        }
    }
    assert!(unanswered.is_empty(), "{}", unanswered.join("\n"));
}
