//! How long tests with random input run: a moment, or as long as somebody wants.

use proptest::test_runner::Config;

/// That many cases, or `FUZZ_CASES` if that is set. Failures are printed with their input, not kept in files.
pub(crate) fn cases(usual: u32) -> Config {
    let wanted = std::env::vars().find(|(name, _)| name == "FUZZ_CASES");
    let cases = wanted.and_then(|(_, text)| text.parse().ok()).unwrap_or(usual);
    Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    }
}
