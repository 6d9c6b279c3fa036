//! The version of this program, and the commit where the build named one.
//!
//! The commit comes from the environment of the build and not from a look at git, so that the same sources give the same
//! binary, an unpacked archive can be built, and a commit does not make every developer's next build link anew.

use std::sync::LazyLock;

/// Text of `--version`, after the name.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    describe(
        env!("CARGO_PKG_VERSION"),
        option_env!("RINGFENCE_COMMIT").unwrap_or_default(),
    )
});

/// Version and commit.
pub(crate) fn text() -> &'static str {
    &TEXT
}

fn describe(version: &str, commit: &str) -> String {
    if commit.is_empty() {
        version.to_owned()
    } else {
        format!("{version} (commit {commit})")
    }
}

#[cfg(test)]
mod tests {
    use super::describe;

    #[test]
    fn the_commit_is_told_where_it_is_known() {
        assert_eq!(
            describe("1.2.3", "0123456789ab-modified"),
            "1.2.3 (commit 0123456789ab-modified)"
        );
        assert_eq!(describe("1.2.3", ""), "1.2.3");
    }
}
