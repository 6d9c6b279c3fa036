//! Ranges and codings under random headers. `PROPTEST_CASES` says how many.

use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ranges_are_within_the_file(
        header in prop_oneof!["bytes=[0-9]{0,3}-[0-9]{0,3}", "bytes= ?[0-9]{0,21}-[0-9]{0,21}", ".{0,20}"],
        size in prop_oneof![0..20_u64, any::<u64>()],
    ) {
        let range = parse_range(&header, size);
        let numbers = header.strip_prefix("bytes=").and_then(|text| text.trim().split_once('-'));
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
        match &range {
            Range::Part { start, end } => {
                prop_assert!(start < end && *end <= size);
                let (first, last) = numbers.unwrap();
                match (number(first), number(last)) {
                    (Some(first), last) => {
                        prop_assert_eq!(*start, first);
                        prop_assert_eq!(*end, last.map_or(size, |last| last.saturating_add(1).min(size)));
                    }
                    (None, Some(suffix)) => prop_assert_eq!((*start, *end), (size.saturating_sub(suffix), size)),
                    (None, None) => prop_assert!(false, "no numbers in {}", header),
                }
            }
            Range::Unsatisfiable => {
                let (first, last) = numbers.unwrap();
                prop_assert!(number(first).is_some_and(|first| first >= size) || number(last) == Some(0) || size == 0);
            }
            Range::Whole => {}
        }
    }

    #[test]
    fn codings_are_among_those_accepted(values in prop::collection::vec(
        "(gzip|identity|\\*|br|GZIP)?(;q=(0|1|0\\.[0-9]{1,3}|x|-1|inf))?(, ?(gzip|identity|\\*)(; ?q=(0|0\\.5|1))?)?|.{0,20}", 0..3)) {
        let mut headers = HeaderMap::new();
        for value in &values {
            if let Ok(value) = HeaderValue::from_str(value) {
                headers.append(header::ACCEPT_ENCODING, value);
            }
        }
        let all = values.join(",").to_ascii_lowercase();
        match coding::choose(&headers) {
            Ok(Coding::Gzip { .. }) => prop_assert!(all.contains("gzip") || all.contains('*')),
            Ok(Coding::Identity) => {}
            Err(failure) => {
                prop_assert_eq!(failure.status, StatusCode::NOT_ACCEPTABLE);
                prop_assert!(all.contains("identity") || all.contains('*'));
            }
        }
    }
}
