//! Signatures of random claims. `PROPTEST_CASES` sets the number of cases.

use proptest::prelude::*;

use super::*;

/// A claim and its token, from a small alphabet so that two of them often agree.
fn claim() -> impl Strategy<Value = (String, &'static str, String, Option<i64>, String)> {
    (
        "[a:0-9/]{0,3}",
        prop_oneof![Just("read"), Just("write")],
        "[a:]{0,2}",
        prop::option::of(prop_oneof![0..3_i64, any::<i64>()]),
        "[ab:0]{1,2}",
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A signature is valid for claims with the same signed text, and for no others.
    #[test]
    fn only_the_signed_claim_is_accepted(one in claim(), other in claim(), change in any::<prop::sample::Index>(), to in any::<char>()) {
        let signed = Claim { path: &one.0, operation: one.1, username: &one.2, expiration: one.3 };
        let asked = Claim { path: &other.0, operation: other.1, username: &other.2, expiration: other.3 };
        let preimage = |claim: &Claim<'_>, token: &str| {
            let expiration = claim.expiration.map(|time| format!(":{time}")).unwrap_or_default();
            format!("{}:{}:{}:{token}{expiration}", claim.path, claim.operation, claim.username)
        };
        let same = preimage(&signed, &one.4) == preimage(&asked, &other.4);
        for form in [Form::Absolute, Form::Relative] {
            let signature = signed.write(&one.4, form);
            prop_assert_eq!(signed.form(&one.4, &signature), Some(form));
            prop_assert_eq!(asked.form(&other.4, &signature), same.then_some(form));
            let at = change.index(signature.len());
            let changed: String = signature
                .char_indices()
                .map(|(index, letter)| if index == at { to } else { letter })
                .collect();
            prop_assert_eq!(signed.verify(&one.4, &changed), changed == signature);
            prop_assert!(!signed.verify(&one.4, &signature[..at]));
        }
    }

    #[test]
    fn arbitrary_text_is_rejected(text in ".{0,80}") {
        let claim = Claim { path: "p", operation: "read", username: "", expiration: None };
        prop_assert!(!claim.verify("token", &text));
    }
}
