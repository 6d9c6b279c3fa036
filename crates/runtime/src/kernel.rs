//! The release of the kernel.

/// The release of the running kernel.
pub(crate) fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The first two numbers of a kernel release.
pub(crate) fn release_numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        for (release, want) in [
            ("6.18.44-fc-v657", Some((6, 18))),
            ("6.1.0-28-cloud-amd64", Some((6, 1))),
            ("10.0", Some((10, 0))),
            ("x", None),
            ("6", None),
        ] {
            assert_eq!(release_numbers(release), want, "{release}");
        }
    }
}
