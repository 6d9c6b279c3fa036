//! Wrong usage and wrong configuration: exit code 2, and a message that names what is wrong.

use std::path::Path;

use super::{Ran, TestDir, command};

#[test]
fn wrong_usage_is_2() {
    let place = TestDir::new();
    for arguments in [
        &["no-such-command"][..],
        &["up", "--no-such-flag"],
        &["up", "--listen", "not-an-address"],
        &["up", "--domain", "a b"],
        &["up", "--log-format", "xml"],
        &["team", "create"],
        &["key", "revoke"],
        &["bench", "--count", "0"],
        &["bench", "--what", "everything"],
        &["bench", "--api-key", "e2b_00"],
    ] {
        place.run(arguments).expect(2);
    }
    assert!(!place.data_dir().exists());
    Ran::of(&mut command(Path::new(env!("CARGO_BIN_EXE_ringfence")))).expect(2);
}

#[test]
fn errors_name_flag_variable_or_file() {
    let place = TestDir::new();
    place
        .run(&["up", "--listen", "nowhere"])
        .expect(2)
        .complains_of(&["listen", "nowhere", "--listen"]);
    let mut with_env = place.ringfence(&["up"]);
    Ran::of(with_env.env("RINGFENCE_SANDBOX_PIDS", "many"))
        .expect(2)
        .complains_of(&["sandbox.pids", "RINGFENCE_SANDBOX_PIDS"]);
    for (content, parts) in [
        ("[sandbox]\nmemory = 1", ["sandbox.memory", "sandbox.memory_mb"]),
        ("launchers = \"two\"", ["launchers", "an integer"]),
        ("listen = ", ["configuration file", "line 1"]),
    ] {
        let file = place.file("ringfence.toml", content);
        let ran = place.run(&["up", "--config", file.to_str().unwrap()]).expect(2);
        ran.complains_of(&parts).complains_of(&["ringfence.toml"]);
        let mut by_env = place.ringfence(&["up"]);
        Ran::of(by_env.env("RINGFENCE_CONFIG", &file))
            .expect(2)
            .complains_of(&parts);
    }
    assert!(!place.data_dir().exists());
}

#[test]
fn passwords_stay_out_of_errors() {
    let place = TestDir::new();
    for (url, code) in [
        ("postgres://user:hunter2@127.0.0.1:port/db", 1),
        ("mysql://user:hunter2@127.0.0.1/db", 2),
    ] {
        let mut list = place.ringfence(&["team", "create", "x", "--log-level", "trace"]);
        let ran = Ran::of(list.env("RINGFENCE_DATABASE_URL", url)).expect(code);
        assert!(
            !ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"),
            "{ran:?}"
        );
    }
}

#[test]
fn help_and_version_are_answers() {
    let place = TestDir::new();
    let version = place.run(&["--version"]).expect(0).stdout;
    let mut expected = concat!("ringfence ", env!("CARGO_PKG_VERSION")).to_owned();
    // The same build made both.
    if let Some(commit) = option_env!("RINGFENCE_COMMIT").filter(|commit| !commit.is_empty()) {
        expected = format!("{expected} (commit {commit})");
    }
    assert_eq!(version.trim(), expected);
    let help = place.run(&["up", "--help"]).expect(0).stdout;
    for part in [
        "--listen",
        "RINGFENCE_LISTEN",
        "127.0.0.1:3000",
        "sandbox.disk_mb",
        "RINGFENCE_SANDBOX_DISK_MB",
    ] {
        assert!(help.contains(part), "{part}: {help}");
    }
    for hidden in ["agent", "spawner", "launcher"] {
        let help = place.run(&["--help"]).expect(0).stdout;
        assert!(
            !help.lines().any(|line| line.trim_start().starts_with(hidden)),
            "{help}"
        );
    }
}

#[test]
fn a_variable_that_means_nothing_is_warned_of() {
    let place = TestDir::new();
    let mut list = place.ringfence(&["team", "list", "--log-format", "json"]);
    let ran = Ran::of(list.env("RINGFENCE_LISTN", "x")).expect(0);
    let line = ran.stderr.lines().next().unwrap();
    let event: serde_json::Value = serde_json::from_str(line).unwrap();
    assert!(
        event["message"].as_str().unwrap().contains("RINGFENCE_LISTN"),
        "{event}"
    );
}

#[test]
fn people_read_the_errors_of_commands_where_the_service_logs_json() {
    let place = TestDir::new();
    let file = place.file("ringfence.toml", "log_format = \"json\"\n");
    let of_flag = ["--log-format", "json"];
    for (flags, begins) in [(&[][..], "ringfence: "), (&of_flag[..], "{")] {
        let mut arguments = vec!["key", "revoke", "unknown", "--config", file.to_str().unwrap()];
        arguments.extend(flags);
        let ran = place.run(&arguments).expect(1);
        assert!(ran.stderr.starts_with(begins), "{ran:?}");
    }
}
