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

/// The two lines that `access-key create` prints.
fn pair_of(output: &str) -> (String, String) {
    let (access, secret) = output.trim().split_once('\n').unwrap();
    let value = |line: &str, name: &str| line.strip_prefix(name).unwrap().to_owned();
    (
        value(access, "RINGFENCE_ACCESS_KEY="),
        value(secret, "RINGFENCE_SECRET_KEY="),
    )
}

#[test]
fn users_have_access_keys_of_their_own() {
    let place = TestDir::new();
    place.run(&["team", "create", "blue"]).expect(0);
    place.run(&["user", "create", "alice", "--team", "blue"]).expect(0);
    place
        .run(&["user", "create", "alice", "--team", "blue"])
        .expect(1)
        .complains_of(&["alice", "already"]);
    let users = place
        .run(&["user", "list", "--team", "blue", "--format", "json"])
        .expect(0)
        .json();
    let names: Vec<_> = users
        .as_array()
        .unwrap()
        .iter()
        .map(|user| user["name"].clone())
        .collect();
    assert_eq!(names, ["default", "alice"]);

    let create = |user: &str| {
        let ran = place.run(&["access-key", "create", "--team", "blue", "--user", user, "--name", "ci"]);
        pair_of(&ran.expect(0).stdout)
    };
    let (alice, default) = (create("alice"), create("default"));
    assert!(alice.0.starts_with("rfa_") && alice.1.starts_with("rfs_") && alice != default);
    let list = || {
        place
            .run(&[
                "access-key",
                "list",
                "--team",
                "blue",
                "--user",
                "alice",
                "--format",
                "json",
            ])
            .expect(0)
    };
    let listed = list();
    assert!(!listed.stdout.contains(&alice.1), "{listed:?}");
    let keys = listed.json();
    assert_eq!(
        (&keys[0]["id"], &keys[0]["user"]),
        (&alice.0.as_str().into(), &"alice".into())
    );
    assert!(keys[1].is_null() && keys[0]["revoked_at"].is_null(), "{keys}");
    place.run(&["access-key", "revoke", &alice.0]).expect(0);
    assert!(list().json()[0]["revoked_at"].is_string());
    place
        .run(&["access-key", "revoke", "nobody"])
        .expect(1)
        .complains_of(&["access-key list"]);
    place
        .run(&["access-key", "create", "--team", "blue", "--user", "bob"])
        .expect(1)
        .complains_of(&["bob", "user create"]);
    place
        .run(&["key", "create", "--team", "blue", "--user", "alice"])
        .expect(0);
}

#[test]
fn the_master_key_is_replaced() {
    let place = TestDir::new();
    let pair = pair_of(&place.run(&["access-key", "create"]).expect(0).stdout);
    let file = place.data_dir().join("secret.key");
    let before = std::fs::read_to_string(&file).unwrap();
    let rotated = place.run(&["master-key", "rotate"]).expect(0);
    // The secret key, and the seed of the tokens.
    assert!(rotated.stdout.starts_with("2 secrets"), "{rotated:?}");
    let after = std::fs::read_to_string(&file).unwrap();
    assert_ne!(before, after);
    assert!(!place.data_dir().join("secret.key.next").exists());
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);

    // With the key before, nothing opens any more, and nothing is changed.
    let old = place.file("old", &before);
    let with_old = |arguments: &[&str]| {
        let mut command = place.ringfence(arguments);
        super::Ran::of(command.env("RINGFENCE_MASTER_KEY_FILE", &old))
    };
    with_old(&["master-key", "rotate"])
        .expect(1)
        .complains_of(&["sealed with another master key"]);
    with_old(&["access-key", "create"])
        .expect(1)
        .complains_of(&["master key"]);

    // A rotation that was cut before its end: both keys are there.
    let next = "0a".repeat(32);
    std::fs::write(place.data_dir().join("secret.key.next"), &next).unwrap();
    place.run(&["access-key", "create"]).expect(0);
    place.run(&["master-key", "rotate"]).expect(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), next);

    // To a key of the operator, which the environment has.
    let new = "0b".repeat(32);
    let to = place.file("new", &new);
    place
        .run(&["master-key", "rotate", "--to", to.to_str().unwrap()])
        .expect(0);
    let mut command = place.ringfence(&["access-key", "create"]);
    let created = super::Ran::of(command.env("RINGFENCE_MASTER_KEY", &new)).expect(0);
    assert!(!created.stderr.contains(&new));
    let mut command = place.ringfence(&["access-key", "create"]);
    command
        .env("RINGFENCE_MASTER_KEY", &new)
        .env("RINGFENCE_MASTER_KEY_FILE", &to);
    super::Ran::of(&mut command)
        .expect(2)
        .complains_of(&["RINGFENCE_MASTER_KEY"]);
    let mut command = place.ringfence(&["team", "list"]);
    let invalid = super::Ran::of(command.env("RINGFENCE_MASTER_KEY", "short-secret")).expect(2);
    assert!(!invalid.stderr.contains("short-secret"), "{invalid:?}");

    // A lost key: what it sealed is given up.
    let forgotten = place.run(&["master-key", "forget"]).expect(0);
    assert!(forgotten.stdout.contains("given up"), "{forgotten:?}");
    let keys = place.run(&["access-key", "list", "--format", "json"]).expect(0).json();
    assert!(keys[0]["id"] == pair.0 && keys[0]["revoked_at"].is_string(), "{keys}");
    place.run(&["access-key", "create"]).expect(0);
}
