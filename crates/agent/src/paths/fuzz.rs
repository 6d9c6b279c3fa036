//! Paths under random input. `PROPTEST_CASES` says how much of it.

use proptest::prelude::*;

use super::*;

/// Reference implementation by text alone, without the standard library's idea of a path.
fn reference(path: &str, home: &str, workdir: Option<&str>) -> Option<String> {
    let below = |rest: &str| {
        let joined = if rest.starts_with('/') {
            rest.to_owned()
        } else {
            format!("{home}/{rest}")
        };
        let mut kept: Vec<&str> = Vec::new();
        for part in joined.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(kept.pop()),
                name => kept.push(name),
            }
        }
        format!("/{}", kept.join("/"))
    };
    Some(match path.chars().next() {
        None => workdir.unwrap_or(home).to_owned(),
        Some('/') => path.to_owned(),
        Some('~') => match path[1..].chars().next() {
            None => home.to_owned(),
            Some('/' | '\\') => below(path[2..].trim_start_matches('/')),
            Some(_) => return None,
        },
        Some(_) => below(path),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn paths_mean_what_they_say(
        path in prop_oneof!["[a~./\\\\]{0,12}", "~?/?(\\.\\.|\\.|a|b c|/|ü){0,6}", ".{0,10}"],
        home in "/[a-z]{1,3}(/[a-z]{1,3}){0,2}",
        workdir in prop::option::of("/[a-z]{1,4}"),
    ) {
        let user = User { name: "user".to_owned(), uid: 1, gid: 1, home: PathBuf::from(&home), has_one_group: false };
        let found = resolve(&path, &user, workdir.as_deref()).ok();
        let expect = reference(&path, &home, workdir.as_deref());
        prop_assert_eq!(found.as_deref().map(Path::as_os_str), expect.as_deref().map(std::ffi::OsStr::new));
        if let Some(found) = found {
            let cleaned = clean(&found);
            prop_assert!(cleaned.is_absolute());
            prop_assert!(!cleaned.components().any(|part| matches!(part, Component::ParentDir | Component::CurDir)));
            prop_assert_eq!(clean(&cleaned), cleaned);
        }
    }
}
