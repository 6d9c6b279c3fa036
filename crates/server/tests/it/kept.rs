//! Sandboxes of which only the disk is kept: paused, and started anew.

use std::time::Duration;

use model::lifecycle::{Kept, State};
use serde_json::{Value, json};
use server::settings::{PauseAnswer, ServerSettings};

use super::pause::{detail, origin, parsed, pause, platform, post, state, traffic, until_state};
use super::platform::{Behaviour, TestPlatform, within};

const TO_DISK: &str = r#"{"memory":false}"#;

async fn pause_to_disk(platform: &TestPlatform, id: &str) {
    assert_eq!(post(platform, id, "pause", TO_DISK).await.status, 204);
    assert!(platform.node.kept.lock().contains(&parsed(id)));
    assert!(!platform.node.running.lock().contains(&parsed(id)));
}

#[tokio::test]
async fn it_starts_anew_with_what_it_had() {
    let platform = platform().await;
    let id = platform
        .create(r#","timeout":600,"envVars":{"TOKEN":"a secret"},"secure":true"#)
        .await;
    let first = platform.node.started.lock().last().expect("a start").clone();
    let execution = |detail: &Value| detail["startedAt"].clone();
    let before = detail(&platform, &id).await;
    platform.clock.advance(10);
    pause_to_disk(&platform, &id).await;
    let paused = detail(&platform, &id).await;
    assert_eq!(
        (&paused["state"], &paused["pauseMode"], &paused["pauseStorage"]),
        (&json!("paused"), &json!("filesystem"), &json!("disk"))
    );
    assert_eq!(paused["pauseDiskBytes"], json!(64 << 20));
    post(&platform, &id, "pause", TO_DISK).await.error(409);
    post(&platform, &id, "pause", "").await.error(409);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 502);
    // Its environment is not in the database in clear.
    let sealed = platform
        .store
        .sandbox_environment(&parsed(&id))
        .await
        .expect("a database");
    let sealed = sealed.expect("an environment");
    assert!(!sealed.as_str().contains("secret") && !sealed.as_str().contains("TOKEN"));

    let platform = platform.restart().await;
    *platform.node.origin.lock() = Some(origin().await);
    let reply = post(&platform, &id, "connect", r#"{"timeout":60}"#).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    assert!(reply.header("server-timing").contains("init;dur="), "{reply:?}");
    assert_eq!(reply.json["envdAccessToken"], before["envdAccessToken"]);
    let booted = platform.node.booted.lock().pop().expect("a start");
    assert_eq!(booted.kept, Kept::Filesystem);
    let boot = booted.boot.expect("what it needs");
    assert_eq!((boot.template, boot.resources), (first.template, first.resources));
    assert_eq!(boot.init.env_vars, first.init.env_vars);
    assert_eq!(boot.init.access_token, first.init.access_token);
    assert_eq!(boot.init.sandbox_id, first.init.sandbox_id);
    assert_eq!(boot.init.default_user, first.init.default_user);
    assert_eq!(booted.egress, first.egress);
    let after = detail(&platform, &id).await;
    assert_eq!(
        (&after["state"], &after["pauseMode"]),
        (&json!("running"), &Value::Null)
    );
    assert_eq!(after["pauseDiskBytes"], Value::Null);
    assert_ne!(execution(&after), execution(&before));
    assert_eq!(platform.seconds_left(&id).await, 60);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 200);
    // A kill of a paused one removes it.
    pause_to_disk(&platform, &id).await;
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    assert!(platform.node.kept.lock().is_empty());
    post(&platform, &id, "resume", "").await.error(404);
}

#[tokio::test]
async fn a_failed_pause_or_resume_loses_nothing() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600"#).await;
    for (behaviour, status) in [
        (Behaviour::Fails, 503),
        (Behaviour::Unsupported, 501),
        (Behaviour::Panics, 503),
    ] {
        *platform.node.pause_to_disk.lock() = behaviour;
        let reply = post(&platform, &id, "pause", TO_DISK).await;
        assert_eq!(reply.status.as_u16(), status, "{reply:?}");
        until_state(&platform, &id, "running").await;
        assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 200);
    }
    *platform.node.pause_to_disk.lock() = Behaviour::Works;
    pause_to_disk(&platform, &id).await;
    for behaviour in [Behaviour::Fails, Behaviour::Full, Behaviour::Unsupported] {
        *platform.node.resume.lock() = behaviour;
        let reply = post(&platform, &id, "resume", "").await;
        assert!([501, 503].contains(&reply.status.as_u16()), "{reply:?}");
        let paused = detail(&platform, &id).await;
        assert_eq!(paused["state"], "paused");
        assert_eq!(paused["pauseMode"], "filesystem");
        let why = paused["resumeError"].as_str().expect("a reason");
        assert!(why.contains("host") && !why.contains("secret"), "{why}");
        assert_eq!(state(&platform, &id).await, State::Paused);
    }
    let log = platform.call("GET", &format!("/v2/sandboxes/{id}/logs"), "").await;
    assert!(log.text.contains("resume_failed"), "{}", log.text);
    *platform.node.resume.lock() = Behaviour::Works;
    assert_eq!(post(&platform, &id, "resume", "").await.status, 201);
    assert_eq!(detail(&platform, &id).await["resumeError"], Value::Null);
    // A panic of unknown effect ends in a known state.
    *platform.node.pause_to_disk.lock() = Behaviour::PanicsAfterwards;
    assert_eq!(post(&platform, &id, "pause", TO_DISK).await.status, 503);
    *platform.node.pause_to_disk.lock() = Behaviour::Works;
    within(async {
        while !["running", "paused"].contains(&detail(&platform, &id).await["state"].as_str().expect("a state")) {}
    })
    .await;
}

#[tokio::test]
async fn processes_are_given_up_on_request() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600"#).await;
    // One that runs is not touched.
    let reply = post(&platform, &id, "connect", r#"{"timeout":60,"memory":false}"#).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    for what in ["resume", "connect"] {
        pause(&platform, &id).await;
        // A failure keeps them.
        *platform.node.pause_to_disk.lock() = Behaviour::Fails;
        post(&platform, &id, what, r#"{"timeout":60,"memory":false}"#)
            .await
            .error(503);
        let paused = detail(&platform, &id).await;
        assert_eq!(
            (&paused["state"], &paused["pauseMode"]),
            (&json!("paused"), &json!("full"))
        );
        *platform.node.pause_to_disk.lock() = Behaviour::Works;
        let reply = post(&platform, &id, what, r#"{"timeout":60,"memory":false}"#).await;
        assert_eq!(reply.status, 201, "{reply:?}");
        assert_eq!(platform.node.booted.lock().drain(..).count(), 1);
        assert_eq!(state(&platform, &id).await, State::Running);
    }
    // Whoever wants that cannot join a resume that keeps them.
    pause(&platform, &id).await;
    *platform.node.resume.lock() = Behaviour::Waits;
    let resuming = {
        let (addr, path) = (platform.addr, format!("/sandboxes/{id}/resume"));
        tokio::spawn(async move {
            let headers = [("host", "localhost"), ("x-api-key", super::platform::KEY)];
            super::platform::send(addr, "POST", &path, &headers, bytes::Bytes::new())
                .await
                .status
        })
    };
    within(platform.node.waiting.notified()).await;
    let reply = post(&platform, &id, "connect", r#"{"timeout":60,"memory":false}"#).await;
    reply.error(409);
    assert_eq!(reply.json["error_code"], "sandbox_start_in_flight");
    *platform.node.resume.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    assert_eq!(within(resuming).await.expect("no panic"), 201);
}

#[tokio::test]
async fn the_deadline_and_traffic() {
    let platform = platform().await;
    // Only the files, because that was asked for.
    let id = platform
        .create(r#","timeout":20,"autoPause":true,"autoPauseMemory":false"#)
        .await;
    // Or because the host can keep nothing else.
    let other = platform
        .create(r#","timeout":20,"autoPause":true,"autoResume":{"enabled":true}"#)
        .await;
    *platform.node.pause.lock() = Behaviour::Unsupported;
    platform.clock.advance(21);
    for id in [&id, &other] {
        // The first attempt, with the processes, shows as paused, too, until it has failed.
        within(async { while detail(&platform, id).await["pauseMode"] != "filesystem" {} }).await;
        until_state(&platform, id, "paused").await;
    }
    within(async {
        loop {
            let log = platform.call("GET", &format!("/v2/sandboxes/{other}/logs"), "").await;
            if log.text.contains("pause_without_processes") {
                break;
            }
        }
    })
    .await;
    // Traffic starts the one that may be resumed by it.
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 502);
    assert_eq!(traffic(&platform, &other, 3000, &[]).await.text, "ok");
    assert_eq!(platform.node.booted.lock().len(), 1);
    // Its lifecycle outlives a resume.
    assert_eq!(post(&platform, &id, "resume", r#"{"timeout":30}"#).await.status, 201);
    platform.clock.advance(31);
    until_state(&platform, &id, "paused").await;
    assert_eq!(detail(&platform, &id).await["pauseMode"], "filesystem");
}

#[tokio::test]
async fn traffic_does_not_start_what_was_paused_for_its_files() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600,"autoResume":{"enabled":true}"#).await;
    pause_to_disk(&platform, &id).await;
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 502);
    let platform = platform.restart().await;
    *platform.node.origin.lock() = Some(origin().await);
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.status, 502);
    let paused = detail(&platform, &id).await;
    assert_eq!(
        (&paused["state"], &paused["lifecycle"]["autoResume"]),
        (&json!("paused"), &json!(true))
    );
    // Started anew by its client, it is one that traffic resumes, when it is paused with its processes.
    assert_eq!(post(&platform, &id, "connect", r#"{"timeout":60}"#).await.status, 201);
    pause(&platform, &id).await;
    assert_eq!(traffic(&platform, &id, 3000, &[]).await.text, "ok");
}

#[tokio::test]
async fn the_node_need_not_have_processes_of_it() {
    let platform = platform().await;
    let id = platform.create(r#","timeout":600"#).await;
    pause_to_disk(&platform, &id).await;
    // A new subscription tells what the node has.
    let (other, lost) = (
        platform.create(r#","timeout":600"#).await,
        platform.create(r#","timeout":600"#).await,
    );
    platform.node.running.lock().remove(&parsed(&lost));
    platform.node.end_subscription();
    platform.until_gone(&lost).await;
    assert_eq!(detail(&platform, &id).await["state"], "paused");
    assert_eq!(detail(&platform, &other).await["state"], "running");
    // One whose disk is gone is reported, and ends, at the next start.
    platform.node.lost.lock().insert(parsed(&id));
    let platform = platform.restart().await;
    platform.until_gone(&id).await;
    assert_eq!(detail(&platform, &other).await["state"], "running");
}

fn at_shutdown(settings: &mut ServerSettings) {
    settings.pause.at_shutdown = true;
}

fn at_shutdown_with_processes(settings: &mut ServerSettings) {
    at_shutdown(settings);
    settings.pause.processes_on_disk = true;
    settings.pause.checkpoints_at_shutdown_within = Duration::from_secs(30);
}

fn at_shutdown_in_a_hurry(settings: &mut ServerSettings) {
    at_shutdown_with_processes(settings);
    settings.pause.checkpoints_at_shutdown_within = Duration::from_millis(200);
}

fn at_shutdown_written_later(settings: &mut ServerSettings) {
    at_shutdown_with_processes(settings);
    settings.pause.answer = PauseAnswer::Frozen;
}

/// Stops a platform with one sandbox that runs and one that is paused in memory, and checks what is kept of both. What the
/// node does with images is `write`, and `kept` is what it keeps then.
async fn check_shutdown(settings: fn(&mut ServerSettings), write: Behaviour, kept: &str) {
    let platform = TestPlatform::start_adjusted(settings).await;
    let (one, two) = (
        platform.create(r#","timeout":600"#).await,
        platform.create(r#","timeout":600"#).await,
    );
    *platform.node.keeps_checkpoints_in_memory.lock() = true;
    pause(&platform, &two).await;
    assert_eq!(detail(&platform, &two).await["pauseStorage"], "memory");
    *platform.node.keeps_checkpoints_in_memory.lock() = false;
    *platform.node.write.lock() = write;
    let platform = platform.restart().await;
    for id in [&one, &two] {
        let detail = detail(&platform, id).await;
        assert_eq!(
            (&detail["state"], &detail["pauseStorage"], &detail["pauseMode"]),
            (&json!("paused"), &json!("disk"), &json!(kept)),
            "{write:?}"
        );
    }
    let log = platform.call("GET", &format!("/v2/sandboxes/{one}/logs"), "").await;
    assert!(log.text.contains("shutdown"), "{}", log.text);
    assert!(platform.node.running.lock().is_empty());
}

#[tokio::test]
async fn the_end_of_the_platform_keeps_everything_on_disk() {
    check_shutdown(at_shutdown, Behaviour::Works, "filesystem").await;
    check_shutdown(at_shutdown_with_processes, Behaviour::Works, "full").await;
    check_shutdown(at_shutdown_written_later, Behaviour::Works, "full").await;
    // What cannot be written with its processes, or not in time.
    for settings in [at_shutdown_with_processes, at_shutdown_written_later] {
        check_shutdown(settings, Behaviour::Unsupported, "filesystem").await;
        check_shutdown(settings, Behaviour::Fails, "filesystem").await;
    }
    check_shutdown(at_shutdown_in_a_hurry, Behaviour::Waits, "filesystem").await;
}
