//! Query strings under random input. `PROPTEST_CASES` says how much of it.

use proptest::prelude::*;

use super::*;

fn encoded(text: &str, which: u8) -> String {
    text.bytes()
        .enumerate()
        .map(|(at, byte)| match byte {
            b' ' if which.is_multiple_of(2) => "+".to_owned(),
            byte if byte.is_ascii_alphanumeric() && (usize::from(which) + at) % 3 != 0 => char::from(byte).to_string(),
            byte if which.is_multiple_of(2) => format!("%{byte:02x}"),
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_encoded_is_decoded(pairs in prop::collection::vec((".{1,5}", ".{0,8}", any::<u8>()), 0..5)) {
        let text: Vec<String> = pairs
            .iter()
            .map(|(name, value, which)| format!("{}={}", encoded(name, *which), encoded(value, *which)))
            .collect();
        let query = Query::parse(Some(&text.join("&")));
        for (name, _, _) in &pairs {
            let first = pairs.iter().find(|(found, _, _)| found == name).map(|(_, value, _)| value.as_str());
            prop_assert_eq!(query.get(name), first);
        }
    }

    #[test]
    fn any_text_is_a_query(text in prop_oneof![".{0,40}", "[a-f%+&=0-9]{0,40}"]) {
        let _ = Query::parse(Some(&text));
        if !text.contains(['%', '+']) {
            prop_assert_eq!(percent::decode(&text, percent::Plus::Space), Ok(text));
        }
    }
}
