//! `team`, `key` and `token` on a data directory that no platform has used yet.

use std::os::unix::fs::MetadataExt;

use super::TestDir;

#[test]
fn a_key_is_shown_once_and_can_be_revoked() {
    let place = TestDir::new();
    place.run(&["team", "create", "blue"]).expect(0);
    let created = place
        .run(&["key", "create", "--team", "blue", "--name", "ci"])
        .expect(0);
    let key = created.stdout.trim();
    assert!(
        key.strip_prefix("e2b_").is_some_and(|hex| hex.len() == 40),
        "{created:?}"
    );
    assert!(!created.stderr.contains(key), "{created:?}");

    let listed = place
        .run(&["key", "list", "--team", "blue", "--format", "json"])
        .expect(0);
    assert!(!listed.stdout.contains(key), "{listed:?}");
    let keys = listed.json();
    assert_eq!((&keys[0]["name"], &keys[0]["team"]), (&"ci".into(), &"blue".into()));
    assert!(keys[0]["revoked_at"].is_null() && keys[1].is_null(), "{keys}");

    let id = keys[0]["id"].as_str().unwrap();
    place.run(&["key", "revoke", id]).expect(0);
    let keys = place.run(&["key", "list", "--format", "json"]).expect(0).json();
    assert!(keys[0]["revoked_at"].is_string(), "{keys}");
    let text = place.run(&["key", "list"]).expect(0).stdout;
    assert!(text.contains("revoked 20"), "{text}");

    // Nothing that holds a secret can be read by others, and the key is in none of it.
    assert_eq!(std::fs::metadata(place.data_dir()).unwrap().mode() & 0o777, 0o700);
    for entry in std::fs::read_dir(place.data_dir()).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().mode() & 0o077, 0, "{entry:?}");
        let content = std::fs::read(entry.path()).unwrap();
        let digits = key.trim_start_matches("e2b_").as_bytes();
        assert!(
            !content.windows(digits.len()).any(|window| window == digits),
            "{entry:?}"
        );
    }
}

#[test]
fn an_access_token_is_shown_once_and_can_be_revoked() {
    let place = TestDir::new();
    place.run(&["team", "create", "blue"]).expect(0);
    let created = place
        .run(&["token", "create", "--team", "blue", "--name", "laptop"])
        .expect(0);
    let token = created.stdout.trim();
    assert!(
        token.strip_prefix("sk_e2b_").is_some_and(|hex| hex.len() == 40),
        "{created:?}"
    );
    let list = || {
        place
            .run(&["token", "list", "--team", "blue", "--format", "json"])
            .expect(0)
    };
    let listed = list();
    assert!(!listed.stdout.contains(token), "{listed:?}");
    let tokens = listed.json();
    assert_eq!(
        (&tokens[0]["name"], &tokens[0]["team"]),
        (&"laptop".into(), &"blue".into())
    );
    let text = place.run(&["token", "list"]).expect(0).stdout;
    assert!(text.contains("laptop") && text.contains("never"), "{text}");

    let id = tokens[0]["id"].as_str().unwrap();
    place.run(&["token", "revoke", id]).expect(0);
    assert_eq!(list().json(), serde_json::json!([]));
    place
        .run(&["token", "revoke", id])
        .expect(1)
        .complains_of(&["token list"]);
    place
        .run(&["token", "create", "--team", "red"])
        .expect(1)
        .complains_of(&["red"]);
}

#[test]
fn what_cannot_be_done_is_1_and_says_why() {
    let place = TestDir::new();
    place.run(&["team", "create", "blue"]).expect(0);
    place
        .run(&["team", "create", "blue"])
        .expect(1)
        .complains_of(&["blue", "already"]);
    place.run(&["team", "create", " "]).expect(1).complains_of(&["name"]);
    place
        .run(&["key", "create", "--team", "red"])
        .expect(1)
        .complains_of(&["red", "team create"]);
    place
        .run(&["key", "list", "--team", "red"])
        .expect(1)
        .complains_of(&["red"]);
    place
        .run(&["key", "revoke", "nothing"])
        .expect(1)
        .complains_of(&["nothing", "key list"]);
}

#[test]
fn teams_are_listed_with_the_default_one() {
    let place = TestDir::new();
    let id = place.run(&["team", "create", "blue"]).expect(0).stdout;
    let teams = place.run(&["team", "list", "--format", "json"]).expect(0).json();
    let names: Vec<_> = teams
        .as_array()
        .unwrap()
        .iter()
        .map(|team| team["name"].clone())
        .collect();
    assert_eq!(names, ["default", "blue"]);
    assert_eq!(teams[1]["id"], id.trim());
}

#[test]
fn a_directory_of_another_program_is_left_alone() {
    let place = TestDir::new();
    std::fs::create_dir(place.data_dir()).unwrap();
    std::fs::write(place.data_dir().join("letter"), "dear").unwrap();
    place
        .run(&["team", "list"])
        .expect(1)
        .complains_of(&["not empty", "--data-dir"]);
    assert_eq!(std::fs::read_dir(place.data_dir()).unwrap().count(), 1);
}
