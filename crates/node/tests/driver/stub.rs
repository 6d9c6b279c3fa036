//! A stub of the agent: the control channel, and a port that echoes.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the stub in its directory until it is killed or receives the line `exit`.
pub(crate) fn run(home: &Path) -> ExitCode {
    let boot = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let control = UnixListener::bind(home.join("control")).unwrap();
    let echoing = UnixListener::bind(home.join("8080")).unwrap();
    let host = home.to_owned();
    std::thread::spawn(move || serve_host(boot, &host));
    let host = home.to_owned();
    std::thread::spawn(move || {
        for connection in control.incoming() {
            let host: PathBuf = host.clone();
            std::thread::spawn(move || serve_host(connection.unwrap(), &host));
        }
    });
    for connection in echoing.incoming() {
        let mut connection = connection.unwrap();
        let mut line = String::new();
        BufReader::new(connection.try_clone().unwrap())
            .read_line(&mut line)
            .unwrap();
        if line == "exit\n" {
            return ExitCode::SUCCESS;
        }
        connection.write_all(line.as_bytes()).unwrap();
    }
    ExitCode::FAILURE
}

/// Answers requests one after the other.
fn serve_host(connection: UnixStream, home: &Path) {
    let mut answers = connection.try_clone().unwrap();
    let mut requests = BufReader::new(connection);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if requests.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let length = head.lines().find_map(|line| {
            line.to_ascii_lowercase()
                .strip_prefix("content-length:")?
                .trim()
                .parse()
                .ok()
        });
        let mut body = vec![0; length.unwrap_or(0)];
        requests.read_exact(&mut body).unwrap();
        let answer = match head.split(' ').nth(1) {
            Some("/init") => format!(
                "HTTP/1.1 204 No Content\r\nx-envd-version: {}\r\n\r\n",
                protocol::agent::VERSION
            ),
            Some("/events") => {
                let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                let event = |text: &str| format!("{:x}\r\n{text}\n\r\n", text.len() + 1);
                let failed = event(r#"{"event":"process_failed","command":"stub","reason":"none"}"#);
                // The first spawner is reported as ended as soon as the host follows the events; the next one stays.
                if home.join("spawner").exists() {
                    format!("{head}{failed}")
                } else {
                    format!("{head}{}0\r\n\r\n", event(r#"{"event":"spawner_gone"}"#))
                }
            }
            _ => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned(),
        };
        if answers.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}
