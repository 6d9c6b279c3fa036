//! Processes: started, signalled, listed.

use std::time::{Duration, Instant};

use protocol::connect::{Code, Codec, Error};
use protocol::process::{
    Empty, ListRequest, ListResponse, ProcessConfig, ProcessSelector, SendSignalRequest, StartRequest, signal,
};

use crate::client::{Client, Rest};
use crate::sandbox::Sandbox;

pub(crate) const CODECS: [Codec; 2] = [Codec::Json, Codec::Proto];

pub(crate) fn config(cmd: &str, args: &[&str]) -> ProcessConfig {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    ProcessConfig {
        cmd: cmd.to_owned(),
        args,
        ..ProcessConfig::default()
    }
}

pub(crate) fn shell(script: &str) -> StartRequest {
    StartRequest {
        process: Some(config("/bin/sh", &["-c", script])),
        stdin: Some(false),
        ..StartRequest::default()
    }
}

pub(crate) fn pid(pid: u32) -> Option<ProcessSelector> {
    Some(ProcessSelector {
        pid: Some(pid),
        tag: None,
    })
}

pub(crate) fn tag(tag: &str) -> Option<ProcessSelector> {
    Some(ProcessSelector {
        pid: None,
        tag: Some(tag.to_owned()),
    })
}

pub(crate) async fn run(client: &mut Client, codec: Codec, request: &StartRequest) -> Rest {
    let mut events = client.stream(codec, "Start", request).await;
    assert!(events.started().await > 1);
    events.rest().await
}

pub(crate) async fn kill(client: &mut Client, process: Option<ProcessSelector>, signal: i32) -> Result<Empty, Error> {
    client
        .unary(Codec::Json, "SendSignal", &SendSignalRequest { process, signal })
        .await
}

#[tokio::test]
async fn output_and_exit_codes() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    for codec in CODECS {
        let rest = run(&mut client, codec, &shell("echo out; echo err >&2")).await;
        assert_eq!((rest.out(), rest.err()), ("out\n", "err\n"));
        assert_eq!(rest.exit(), (0, true, "exit status 0", None));
        let rest = run(&mut client, codec, &shell("exit 42")).await;
        assert_eq!(rest.exit(), (42, true, "exit status 42", Some("exit status 42")));
        let rest = run(&mut client, codec, &shell("kill -SEGV $$")).await;
        let (code, exited, status, error) = rest.exit();
        assert_eq!((code, exited, Some(status)), (-1, false, error));
        assert!(status.starts_with("signal: segmentation fault"), "{status}");
        // More than any pipe or queue holds, complete and in order.
        let rest = run(&mut client, codec, &shell("seq 1 200000")).await;
        let expect: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
        assert!(rest.out() == expect);
    }
}

#[tokio::test]
async fn what_cannot_be_executed() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let plain = sandbox.path("plain");
    std::fs::write(&plain, "echo $0 $1 ran").unwrap();
    let script = plain.to_str().unwrap();
    for codec in CODECS {
        for (cmd, code, reason) in [
            ("no-such-program", 127, "no-such-program: No such file or directory\n"),
            ("/no/such", 127, "/no/such: No such file or directory\n"),
            ("", 127, ": No such file or directory\n"),
            ("/etc/passwd", 126, "/etc/passwd: Permission denied\n"),
            ("/tmp", 126, "/tmp: Permission denied\n"),
        ] {
            let request = StartRequest {
                process: Some(config(cmd, &["x"])),
                ..StartRequest::default()
            };
            let rest = run(&mut client, codec, &request).await;
            assert_eq!((rest.exit().0, rest.err()), (code, reason), "{cmd}");
        }
    }
    std::fs::set_permissions(&plain, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let request = StartRequest {
        process: Some(config(script, &["arg"])),
        ..StartRequest::default()
    };
    assert_eq!(
        run(&mut client, Codec::Json, &request).await.out(),
        format!("{script} arg ran\n")
    );
}

#[tokio::test]
async fn the_environment_and_the_user() {
    let init = r#"{"envVars":{"A":"init","B":"init","E2B_SANDBOX":"no","HOME":"/h"},"sandboxId":"s"}"#;
    let Some(sandbox) = Sandbox::ready(init).await else {
        return;
    };
    let home = sandbox.path("home/user");
    for codec in CODECS {
        let mut request = StartRequest {
            process: Some(config("env", &[])),
            ..StartRequest::default()
        };
        let envs = [("B", "request"), ("E2B_SANDBOX_ID", "mine"), ("HOME", "/mine")];
        let envs = envs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        request.process.as_mut().unwrap().envs = envs.into_iter().collect();
        let mut client = sandbox.client().await.user("user");
        let rest = run(&mut client, codec, &request).await;
        let mut lines: Vec<_> = rest.out().lines().collect();
        lines.sort_unstable();
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let expect = [
            "A=init",
            "B=request",
            "E2B_SANDBOX=true",
            "E2B_SANDBOX_ID=mine",
            "HOME=/mine",
            "LOGNAME=user",
        ];
        assert_eq!(lines, [expect.as_slice(), &[path, "USER=user"]].concat());

        // The agent marks a process right after it started.
        let script = "until grep -qx 500 /proc/$$/oom_score_adj; do :; done; \
                      id -u; id -g; id -G; pwd; umask; cat /proc/self/oom_score_adj; \
                      grep -E '^(SigIgn|SigBlk)' /proc/self/status; ls /proc/self/fd | wc -l";
        let rest = run(&mut client, codec, &shell(script)).await;
        let none = "0000000000000000";
        // `ls` has its directory open besides stdin, stdout and stderr.
        let expect = format!(
            "1000\n1000\n1000 2000\n{}\n0022\n500\nSigBlk:\t{none}\nSigIgn:\t{none}\n4\n",
            home.display()
        );
        assert_eq!(rest.out(), expect);
        let rest = run(&mut sandbox.client().await, codec, &shell("id -u; id -G; echo $PPID")).await;
        assert_eq!(rest.out(), "0\n0\n1\n");
    }
}

#[tokio::test]
async fn working_directories() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    std::fs::create_dir(sandbox.path("closed")).unwrap();
    std::fs::set_permissions(
        sandbox.path("closed"),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    std::fs::create_dir(sandbox.path("home/user/sub")).unwrap();
    let closed = sandbox.path("closed").display().to_string();
    let passwd = sandbox.path("passwd").display().to_string();
    let home = sandbox.path("home/user").display().to_string();
    let request = |cwd: &str| {
        let mut config = config("pwd", &[]);
        config.cwd = Some(cwd.to_owned());
        StartRequest {
            process: Some(config),
            ..StartRequest::default()
        }
    };
    for codec in CODECS {
        let mut client = sandbox.client().await.user("user");
        for (cwd, expect) in [
            ("/usr", "/usr"),
            ("", &home),
            ("~", &home),
            ("sub", &format!("{home}/sub")),
        ] {
            assert_eq!(
                run(&mut client, codec, &request(cwd)).await.out(),
                format!("{expect}\n"),
                "{cwd}"
            );
        }
        for (cwd, message) in [
            ("/no/where", "cwd '/no/where' does not exist".to_owned()),
            (
                &closed,
                format!("error starting process 'pwd': chdir {closed}: permission denied"),
            ),
            (
                &passwd,
                format!("error starting process 'pwd': chdir {passwd}: not a directory"),
            ),
            (
                "~root",
                "failed to expand path '~root' for user 'user': cannot expand user-specific home dir".to_owned(),
            ),
        ] {
            let error = client.stream(codec, "Start", &request(cwd)).await.failed().await;
            assert_eq!((error.code, error.message), (Code::InvalidArgument, message));
        }
        let mut lost = sandbox.client().await.user("lost");
        let error = lost.stream(codec, "Start", &request("")).await.failed().await;
        assert_eq!(error.message, "cwd '/nowhere' does not exist");
    }
    sandbox
        .host()
        .await
        .post("/init", r#"{"defaultWorkdir":"/usr","defaultUser":"user"}"#)
        .await;
    let mut client = sandbox.client().await;
    assert_eq!(run(&mut client, Codec::Json, &request("")).await.out(), "/usr\n");
    assert_eq!(
        run(&mut client, Codec::Json, &request("sub")).await.out(),
        format!("{home}/sub\n")
    );
}

#[tokio::test]
async fn two_megabytes_of_arguments_and_environment() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    for codec in CODECS {
        // One string may have 128 KiB, all together a quarter of the stack limit of 8 MiB.
        let mut request = shell("echo ${#A} $#");
        let config = request.process.as_mut().unwrap();
        config.args.extend((0..8).map(|_| "x".repeat(100_000)));
        config.envs.insert("A".to_owned(), "a".repeat(100_000));
        config
            .envs
            .extend((0..10).map(|number| (format!("B{number}"), "b".repeat(100_000))));
        assert_eq!(run(&mut client, codec, &request).await.out(), "100000 7\n");
        request.process.as_mut().unwrap().args.push("y".repeat(200_000));
        let rest = run(&mut client, codec, &request).await;
        assert_eq!((rest.exit().0, rest.err()), (126, "/bin/sh: Argument list too long\n"));
        request
            .process
            .as_mut()
            .unwrap()
            .envs
            .insert("N".to_owned(), "a\0b".to_owned());
        assert_eq!(
            client.stream(codec, "Start", &request).await.failed().await.code,
            Code::InvalidArgument
        );
    }
}

#[tokio::test]
async fn signals_and_lists() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    for codec in CODECS {
        for (number, status) in [(signal::KILL, "signal: killed"), (signal::TERM, "signal: terminated")] {
            let mut client = sandbox.client().await;
            let mut request = shell("echo ready; exec sleep 1000");
            request.tag = Some("sleeper".to_owned());
            request
                .process
                .as_mut()
                .unwrap()
                .envs
                .insert("K".to_owned(), "V".to_owned());
            let mut events = client.stream(codec, "Start", &request).await;
            let started = events.started().await;
            events.until("ready").await;
            let list: ListResponse = other.unary(codec, "List", &ListRequest {}).await.unwrap();
            let [listed] = list.processes.as_slice() else {
                panic!("{list:?}")
            };
            assert_eq!((listed.pid, listed.tag.as_deref()), (started, Some("sleeper")));
            assert_eq!(listed.config, request.process);

            let message = SendSignalRequest {
                process: tag("sleeper"),
                signal: number,
            };
            other.unary::<Empty>(codec, "SendSignal", &message).await.unwrap();
            let rest = events.rest().await;
            assert_eq!(rest.exit(), (-1, false, status, Some(status)));
            let list: ListResponse = other.unary(codec, "List", &ListRequest {}).await.unwrap();
            assert_eq!(list.processes, []);
            let error = other.unary::<Empty>(codec, "SendSignal", &message).await.unwrap_err();
            assert_eq!(
                (error.code, error.message.as_str()),
                (Code::NotFound, "process with tag sleeper not found")
            );
        }
        let error = kill(&mut other, pid(999_999), signal::KILL).await.unwrap_err();
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::NotFound, "process with pid 999999 not found")
        );
        assert_eq!(
            kill(&mut other, None, signal::KILL).await.unwrap_err().code,
            Code::Unimplemented
        );
        let mut client = sandbox.client().await;
        let mut events = client.stream(codec, "Start", &shell("sleep 1000")).await;
        let started = events.started().await;
        let error = kill(&mut other, pid(started), 0).await.unwrap_err();
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::Unimplemented, "invalid signal: SIGNAL_UNSPECIFIED")
        );
        assert_eq!(
            kill(&mut other, pid(started), 1).await.unwrap_err().code,
            Code::Unimplemented
        );
        kill(&mut other, pid(started), signal::KILL).await.unwrap();
        events.rest().await;
    }
}

#[tokio::test]
async fn orphans_are_reaped() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    run(
        &mut client,
        Codec::Json,
        &shell("for i in $(seq 100); do (true &) ; done"),
    )
    .await;
    let count = shell("cat /proc/[0-9]*/status | grep -c '^State:.Z'");
    while run(&mut client, Codec::Json, &count).await.out() != "0\n" {}
}

#[tokio::test]
async fn many_at_once() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut running = Vec::new();
    for number in 0..50 {
        let mut client = sandbox.client().await;
        running.push(tokio::spawn(async move {
            for round in 0..4 {
                let rest = run(
                    &mut client,
                    Codec::Json,
                    &shell(&format!("echo {number} {round}; exit {round}")),
                )
                .await;
                assert_eq!(rest.out(), format!("{number} {round}\n"));
                assert_eq!(rest.exit().0, round);
            }
        }));
    }
    for task in running {
        task.await.unwrap();
    }
}

/// How long the agent waits for the end of what it was told to kill. It answers in any case then, as on a machine that stands
/// still meanwhile.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Number of processes that the agent knows.
async fn running(client: &mut Client) -> usize {
    let list: ListResponse = client.unary(Codec::Json, "List", &ListRequest {}).await.unwrap();
    list.processes.len()
}

#[tokio::test]
async fn who_was_killed_is_gone_when_the_answer_comes() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    let mut late = 0;
    for round in 0..30 {
        // Asleep; deaf and stopped; writing to a client that does not read; survived by who holds its output.
        for script in [
            "echo up; exec sleep 1000",
            "trap '' TERM; echo up; kill -STOP $$",
            "echo up; exec cat /dev/zero",
            "sleep 1000 & echo up; wait",
        ] {
            let mut client = sandbox.client().await;
            let mut events = client.stream(Codec::Proto, "Start", &shell(script)).await;
            let started = events.started().await;
            events.until("up").await;
            let begun = Instant::now();
            kill(&mut other, pid(started), signal::KILL).await.unwrap();
            if begun.elapsed() >= END_PATIENCE {
                late += 1;
                assert!(late < 10, "round {round}: {script}");
                while running(&mut other).await > 0 {}
                continue;
            }
            assert_eq!(running(&mut other).await, 0, "round {round}: {script}");
            let gone = kill(&mut other, pid(started), signal::KILL).await.unwrap_err();
            assert_eq!(gone.code, Code::NotFound, "round {round}: {script}");
        }
    }
}
