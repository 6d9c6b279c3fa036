//! Any text is parsed or refused, in bounded time.

use std::collections::BTreeMap;

use dockerfile::{EXPANDED_MAX, Escape, Ignore, Kind, Plan, Source, expand, matches};
use proptest::prelude::*;

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("FROM a AS b\n".to_owned()),
        Just("FROM b\n".to_owned()),
        Just("RUN <<EOF\n".to_owned()),
        Just("EOF\n".to_owned()),
        Just("COPY --from=b --chown=$X a/* ${Y:-\"z\"}/\n".to_owned()),
        Just("COPY <<-'A B' <<C /d/\n".to_owned()),
        Just("ENV a=\"b c\" d=${a:+$e}\n".to_owned()),
        Just("ARG A=1 B\n".to_owned()),
        Just("# escape=`\n".to_owned()),
        Just("CMD [\"a\", \"b\"]\n".to_owned()),
        Just("\\\n".to_owned()),
        Just("`\n".to_owned()),
        "[ -~]{0,12}",
        "[$\\{\\}\"'<\\\\:+=\\-\\t\\r\\n#\\[\\]]{0,12}",
        "\\PC{0,6}",
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_is_parsed_or_refused(text in text(), value in "[ -~]{0,20}") {
        let given = BTreeMap::from([("A".to_owned(), value.clone())]);
        let lines = text.split('\n').count();
        match Plan::parse(&text, None, &given, "linux/amd64") {
            Err(refusal) => prop_assert!((1..=lines).contains(&refusal.line), "{refusal}"),
            Ok(plan) => {
                prop_assert_eq!(plan.needed().len(), plan.stages.len());
                for instruction in plan.stages.iter().flat_map(|stage| &stage.instructions) {
                    prop_assert!((1..=lines).contains(&instruction.line));
                    let mut words = Vec::new();
                    match &instruction.kind {
                        Kind::Copy(copy) => {
                            words.push(&copy.dest);
                            words.extend(copy.sources.iter().map(|source| match source {
                                Source::Path(path) => path,
                                Source::File { content, .. } => content,
                            }));
                        }
                        Kind::Env(pairs) => words.extend(pairs.iter().map(|(_, value)| value)),
                        _ => words.push(&instruction.text),
                    }
                    for word in words {
                        if let Ok(expanded) = expand(word, plan.escape, &|_| Some(value.as_str())) {
                            prop_assert!(expanded.len() <= EXPANDED_MAX);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn words_without_special_characters_stay(word in "[a-zA-Z0-9/._ -]{0,40}") {
        prop_assert_eq!(expand(&word, Escape::Backslash, &|_| None), Ok(word));
    }

    #[test]
    fn patterns_and_ignore_files_end(pattern in "[*?a\\[\\]^\\\\-]{0,30}", name in "[ab\\]^-]{0,30}", file in "[*/!.a# \n]{0,60}") {
        let _ = matches(pattern.as_bytes(), name.as_bytes());
        if let Ok(ignore) = Ignore::parse(&file) {
            let _ = ignore.is_ignored(&name);
        }
    }
}
