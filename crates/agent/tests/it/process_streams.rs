//! Streams of events: who gets what, who waits for whom, and how they end.

use std::time::{Duration, Instant};

use bytes::Bytes;
use protocol::agent::{OUTPUT_HEADER, UNTIL_EXIT};
use protocol::connect::{Code, Codec, Message};
use protocol::process::{
    CloseStdinRequest, ConnectRequest, Empty, ListRequest, ListResponse, ProcessInput, SendInputRequest, signal,
};

use crate::client::Client;
use crate::process::{CODECS, kill, pid, run, shell, tag};
use crate::sandbox::Sandbox;

#[tokio::test]
async fn connecting_to_the_living_and_the_dead() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    for codec in CODECS {
        let mut client = sandbox.client().await;
        let mut request = shell("echo early; read line; echo got $line; exit 7");
        request.stdin = Some(true);
        request.tag = Some(format!("{codec:?}"));
        let mut starter = client.stream(codec, "Start", &request).await;
        let started = starter.started().await;
        starter.until("early").await;
        let mut second_client = sandbox.client().await;
        let connect = ConnectRequest {
            process: tag(&format!("{codec:?}")),
        };
        let mut second = second_client.stream(codec, "Connect", &connect).await;
        assert_eq!(second.started().await, started);
        // The starter leaves; the process and the other listener stay.
        drop(starter);
        drop(client);
        let input = Some(ProcessInput {
            stdin: Some(Bytes::from_static(b"x\n")),
            pty: None,
        });
        let message = SendInputRequest {
            process: pid(started),
            input,
        };
        other.unary::<Empty>(codec, "SendInput", &message).await.unwrap();
        let rest = second.rest().await;
        assert_eq!((rest.out(), rest.exit().0), ("got x\n", 7));

        for selector in [pid(started), tag(&format!("{codec:?}"))] {
            let mut events = other
                .stream(codec, "Connect", &ConnectRequest { process: selector })
                .await;
            assert_eq!(events.started().await, started);
            let rest = events.rest().await;
            assert_eq!((rest.out(), rest.exit().0), ("", 7));
        }
        let error = other
            .stream(codec, "Connect", &ConnectRequest { process: tag("no") })
            .await
            .failed()
            .await;
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::NotFound, "process with tag no not found")
        );
        let error = other
            .stream(codec, "Connect", &ConnectRequest { process: None })
            .await
            .failed()
            .await;
        assert_eq!(error.code, Code::Unimplemented);
    }
}

/// Makes a call with a deadline that ends its stream, and returns the pid that was in its first event. On a busy machine the
/// deadline may come before that: it is tried again with twice the time then.
async fn ended_by_deadline(client: &mut Client, codec: Codec, method: &str, message: &impl Message) -> u32 {
    let mut timeout = Duration::from_millis(300);
    loop {
        client
            .headers
            .insert("connect-timeout-ms", timeout.as_millis().to_string().parse().unwrap());
        let begun = Instant::now();
        let mut events = client.stream(codec, method, message).await;
        let first = events.next().await;
        let started = first
            .as_ref()
            .ok()
            .map(|event| event.start.expect("start comes first").pid);
        let mut next = first;
        let end = loop {
            match next {
                // Not kept: there may be much of it.
                Ok(_) => next = events.next().await,
                Err(end) => break end,
            }
        };
        assert_eq!(end.error.unwrap().code, Code::DeadlineExceeded);
        assert!(begun.elapsed() >= timeout);
        if let Some(pid) = started {
            return pid;
        }
        timeout *= 2;
        assert!(timeout < Duration::from_secs(60), "it never starts in time");
    }
}

#[tokio::test]
async fn deadlines_kill() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut client = sandbox.client().await;
        let mut request = shell("echo going; exec sleep 1000");
        request.tag = Some("doomed".to_owned());
        let started = ended_by_deadline(&mut client, codec, "Start", &request).await;
        let mut other = sandbox.client().await;
        let mut events = other
            .stream(codec, "Connect", &ConnectRequest { process: pid(started) })
            .await;
        events.started().await;
        assert_eq!(events.rest().await.exit().2, "signal: killed");

        // On Connect it ends the stream only.
        let mut events = other.stream(codec, "Start", &shell("exec sleep 1000")).await;
        let started = events.started().await;
        let connect = ConnectRequest { process: pid(started) };
        assert_eq!(
            ended_by_deadline(&mut client, codec, "Connect", &connect).await,
            started
        );
        let mut third = sandbox.client().await;
        kill(&mut third, pid(started), signal::KILL).await.unwrap();
        events.rest().await;

        // However much there is to say.
        let mut events = other.stream(codec, "Start", &shell("exec cat /dev/zero")).await;
        let started = events.started().await;
        drop(events);
        let mut other = sandbox.client().await;
        let connect = ConnectRequest { process: pid(started) };
        assert_eq!(
            ended_by_deadline(&mut client, codec, "Connect", &connect).await,
            started
        );
        kill(&mut other, pid(started), signal::KILL).await.unwrap();

        let mut invalid = sandbox.client().await.with("connect-timeout-ms", "soon");
        let error = invalid.stream(codec, "Start", &shell("true")).await.failed().await;
        assert_eq!(error.code, Code::InvalidArgument);
        let mut none = sandbox.client().await.with("connect-timeout-ms", "0");
        assert_eq!(run(&mut none, codec, &shell("sleep 0.1")).await.exit().0, 0);
    }
}

#[tokio::test]
async fn descendants_delay_the_end_until_they_are_killed() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut other = sandbox.client().await;
    let mut client = sandbox.client().await;
    let rest = run(&mut client, Codec::Json, &shell("echo soon; (sleep 0.3; echo late) &")).await;
    assert_eq!((rest.out(), rest.exit().0), ("soon\nlate\n", 0));

    let mut events = client
        .stream(Codec::Json, "Start", &shell("sleep 1000 & echo out; exit 3"))
        .await;
    let started = events.started().await;
    events.until("out").await;
    // Until it is over, and only the end of its output is missing.
    let probe = shell(&format!("kill -0 {started} 2>/dev/null"));
    while run(&mut other, Codec::Json, &probe).await.exit().0 == 0 {}
    kill(&mut other, pid(started), signal::KILL).await.unwrap();
    assert_eq!(events.rest().await.exit().0, 3);

    // What a process wrote before it was killed is not lost, even if another process holds the pipe.
    let marker = sandbox.path("written");
    let mut request = shell(&format!(
        "sleep 1000 & echo last words; echo > {}; read x",
        marker.display()
    ));
    request.stdin = Some(true);
    let mut events = client.stream(Codec::Json, "Start", &request).await;
    let started = events.started().await;
    while !marker.exists() {
        assert_eq!(other.get("/health").await.status, 204);
    }
    kill(&mut other, pid(started), signal::TERM).await.unwrap();
    let rest = events.rest().await;
    assert_eq!((rest.out(), rest.exit().2), ("last words\n", "signal: terminated"));
}

#[tokio::test]
async fn output_without_listeners_is_discarded() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let marker = sandbox.path("done");
    let mut client = sandbox.client().await;
    // Far more than the pipe holds: it could not finish if nobody read.
    let script = format!("echo started; read x; seq 1 300000; echo > {}", marker.display());
    let mut request = shell(&script);
    request.stdin = Some(true);
    let mut events = client.stream(Codec::Json, "Start", &request).await;
    let started = events.started().await;
    events.until("started").await;
    drop(events);
    drop(client);
    let mut other = sandbox.client().await;
    other
        .unary::<Empty>(Codec::Json, "CloseStdin", &CloseStdinRequest { process: pid(started) })
        .await
        .unwrap();
    let mut watcher = sandbox.client().await;
    let mut events = watcher
        .stream(Codec::Json, "Connect", &ConnectRequest { process: pid(started) })
        .await;
    events.started().await;
    assert_eq!(events.rest().await.exit().0, 0);
    assert!(marker.exists());
}

#[tokio::test]
async fn slow_listeners_slow_the_process_down() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let mut client = sandbox.client().await;
    let mut events = client
        .stream(Codec::Proto, "Start", &shell("exec head -c 200000000 /dev/zero"))
        .await;
    let started = events.started().await;
    // Nobody reads the stream now, so the process waits and the agent does not swell.
    let mut other = sandbox.client().await;
    let mut quiet = 0;
    let mut last = 0;
    while quiet < 20 {
        assert_eq!(other.get("/health").await.status, 204);
        let memory = sandbox.memory("RssAnon");
        assert!(memory < 20_000, "{memory} kB");
        quiet = if memory == last { quiet + 1 } else { 0 };
        last = memory;
    }
    let list: ListResponse = other.unary(Codec::Json, "List", &ListRequest {}).await.unwrap();
    assert_eq!(list.processes[0].pid, started);
    let rest = events.rest().await;
    assert_eq!(rest.stdout.len(), 200_000_000);
    assert_eq!(rest.exit().0, 0);
}

#[tokio::test]
async fn keepalives_fill_silence() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut client = sandbox.client().await.with("keepalive-ping-interval", "1");
        let mut request = shell("read line; echo $line");
        request.stdin = Some(true);
        let begun = Instant::now();
        let mut events = client.stream(codec, "Start", &request).await;
        let started = events.started().await;
        assert_eq!(events.next().await.unwrap().keepalive, Some(Empty {}));
        assert!(begun.elapsed() >= Duration::from_secs(1));
        let input = SendInputRequest {
            process: pid(started),
            input: Some(ProcessInput {
                stdin: Some(Bytes::from_static(b"x\n")),
                pty: None,
            }),
        };
        let mut other = sandbox.client().await;
        other.unary::<Empty>(codec, "SendInput", &input).await.unwrap();
        let rest = events.rest().await;
        assert_eq!((rest.out(), rest.exit().0), ("x\n", 0));
        let mut client = sandbox.client().await.with("keepalive-ping-interval", "-1");
        assert_eq!(run(&mut client, codec, &shell("true")).await.keepalives, 0);
    }
}

#[tokio::test]
async fn an_end_with_the_exit_has_all_output_before_it() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    for codec in CODECS {
        let mut client = sandbox.client().await.with(OUTPUT_HEADER, UNTIL_EXIT);
        let rest = run(
            &mut client,
            codec,
            &shell("sleep 1000 & echo out; echo err >&2; exit 3"),
        )
        .await;
        assert_eq!((rest.out(), rest.err(), rest.exit().0), ("out\n", "err\n", 3));
        // As much as a pipe holds, for a client that reads late: nothing of it may be left out.
        let mut events = client
            .stream(codec, "Start", &shell("sleep 1000 & head -c 1000000 /dev/zero; exit 0"))
            .await;
        events.started().await;
        assert_eq!(events.rest().await.stdout.len(), 1_000_000);
        // What never stops writing is not waited for either, and not stopped.
        let (goes_on, stop) = (sandbox.path("goes-on"), sandbox.path(&format!("stop-{codec:?}")));
        let script = format!(
            "(while echo more; do : > {}; [ ! -e {} ] || exit; done) & echo first; exit 4",
            goes_on.display(),
            stop.display()
        );
        let rest = run(&mut client, codec, &shell(&script)).await;
        assert!(rest.out().contains("first\n"));
        assert_eq!(rest.exit().0, 4);
        let mut other = sandbox.client().await;
        for _ in 0..2 {
            let _ = std::fs::remove_file(&goes_on);
            while !goes_on.exists() {
                assert_eq!(other.get("/health").await.status, 204);
            }
        }
        std::fs::write(&stop, "").unwrap();
    }
    // Any other value, and none, is the end of the output.
    let mut client = sandbox.client().await.with(OUTPUT_HEADER, "later");
    let rest = run(&mut client, Codec::Json, &shell("echo soon; (sleep 0.3; echo late) &")).await;
    assert_eq!(rest.out(), "soon\nlate\n");
}

#[tokio::test]
async fn the_user_of_a_process_owns_its_pipes() {
    let Some(sandbox) = Sandbox::ready("{}").await else {
        return;
    };
    let script = "cat /proc/self/fd/0 > /proc/self/fd/1; echo err > /proc/self/fd/2; \
                  for fd in 0 1 2; do stat -Lc %u:%a /proc/self/fd/$fd; done";
    for (user, uid) in [("user", 1000), ("root", 0)] {
        let mut client = sandbox.client().await.user(user);
        let mut request = shell(script);
        request.stdin = Some(true);
        let mut events = client.stream(Codec::Json, "Start", &request).await;
        let process = pid(events.started().await);
        let mut other = sandbox.client().await;
        let input = SendInputRequest {
            process: process.clone(),
            input: Some(ProcessInput {
                stdin: Some(Bytes::from_static(b"in\n")),
                pty: None,
            }),
        };
        other.unary::<Empty>(Codec::Json, "SendInput", &input).await.unwrap();
        let close = CloseStdinRequest { process };
        other.unary::<Empty>(Codec::Json, "CloseStdin", &close).await.unwrap();
        let rest = events.rest().await;
        let owner = format!("{uid}:600\n");
        assert_eq!(
            (rest.out(), rest.err()),
            (format!("in\n{}", owner.repeat(3)).as_str(), "err\n")
        );
    }
    // Those of another user stay closed.
    let mut root = sandbox.client().await.user("root");
    let mut events = root
        .stream(Codec::Json, "Start", &shell("echo started; exec sleep 1000"))
        .await;
    let of_root = events.started().await;
    events.until("started").await;
    let mut user = sandbox.client().await.user("user");
    let script = format!("cat /proc/{of_root}/fd/1");
    let rest = run(&mut user, Codec::Json, &shell(&script)).await;
    assert!(rest.err().contains("Permission denied"), "{}", rest.err());
    kill(&mut user, pid(of_root), signal::KILL).await.unwrap();
}
