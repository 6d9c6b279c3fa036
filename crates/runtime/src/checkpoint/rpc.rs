//! What this program and CRIU say to each other: the protocol of `criu swrk`, with the messages of `images/rpc.proto` in
//! CRIU's source. CRIU gets one request with its settings, reports each of its steps, and waits for the answer.
//!
//! ```text
//!   criu_req     { criu_req_type type = 1, criu_opts opts = 2, bool notify_success = 3 }
//!   criu_opts    { int32 images_dir_fd = 1, int32 pid = 2, int32 log_level = 9, bool notify_scripts = 12,
//!                  string config_file = 51 }
//!   criu_resp    { criu_req_type type = 1, bool success = 2, criu_notify notify = 5 }
//!   criu_notify  { string script = 1, int32 pid = 2 }
//! ```
//!
//! The settings are in a file, in the words of CRIU's command line. Some have no field in the request, or one that only
//! later versions know.

use std::fmt::Write as _;
use std::io;

use prost::Message;

const DUMP: i32 = 1;
const RESTORE: i32 = 2;
const NOTIFY: i32 = 6;
/// In the place of a descriptor: the settings have the path.
const NONE: i32 = -1;
/// Errors alone.
const LOG_LEVEL: i32 = 1;

/// What CRIU is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Write the checkpoint of a process and of all below it.
    Dump {
        /// Its pid on the host.
        pid: i32,
    },
    /// Restore what a checkpoint has.
    Restore {
        /// Whether names in the file systems of the sandbox are removed afterwards.
        removes_names: bool,
    },
}

#[derive(Message)]
struct Request {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "2")]
    options: Option<RequestOptions>,
    #[prost(bool, optional, tag = "3")]
    success: Option<bool>,
}

#[derive(Message)]
struct RequestOptions {
    #[prost(int32, required, tag = "1")]
    directory: i32,
    #[prost(int32, optional, tag = "2")]
    pid: Option<i32>,
    #[prost(int32, optional, tag = "9")]
    log_level: Option<i32>,
    #[prost(bool, optional, tag = "12")]
    notifies: Option<bool>,
    #[prost(string, optional, tag = "51")]
    settings: Option<String>,
}

#[derive(Message)]
struct Response {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "5")]
    notification: Option<Notification>,
}

#[derive(Message)]
struct Notification {
    #[prost(string, tag = "1")]
    step: String,
    #[prost(int32, tag = "2")]
    pid: i32,
}

/// The request that begins a run, with the path of the file that has its settings.
pub(super) fn request(task: Task, settings: &str) -> Vec<u8> {
    let (kind, pid) = match task {
        Task::Dump { pid } => (DUMP, Some(pid)),
        Task::Restore { .. } => (RESTORE, None),
    };
    let options = RequestOptions {
        directory: NONE,
        pid,
        log_level: Some(LOG_LEVEL),
        notifies: Some(true),
        settings: Some(settings.to_owned()),
    };
    let request = Request {
        kind,
        options: Some(options),
        success: None,
    };
    request.encode_to_vec()
}

/// The answer to a step: whether to go on, or to fail.
pub(super) fn answer(goes_on: bool) -> Vec<u8> {
    let answer = Request {
        kind: NOTIFY,
        options: None,
        success: Some(goes_on),
    };
    answer.encode_to_vec()
}

/// The step that CRIU reports, with the pid of the first process where it is known, and otherwise 0; `None` for its last
/// message, the result.
///
/// # Errors
/// When it is no message of CRIU.
pub(super) fn step(message: &[u8]) -> io::Result<Option<(String, i32)>> {
    let response = Response::decode(message).map_err(io::Error::other)?;
    let notification = response.notification.filter(|_| response.kind == NOTIFY);
    Ok(notification.map(|notification| (notification.step, notification.pid)))
}

/// CriuSettings of a run.
#[derive(Debug)]
pub(crate) struct CriuSettings(String);

impl CriuSettings {
    /// The settings that writing and restoring have in common.
    pub(crate) fn new() -> Self {
        let mut settings = Self(String::new());
        for setting in [
            "manage-cgroups=ignore",
            "tcp-established",
            "empty-ns net",
            "file-locks",
            "link-remap",
            "timeout 10",
        ] {
            settings.add(setting);
        }
        settings
    }

    /// Adds a setting as it is written in the file.
    pub(crate) fn add(&mut self, setting: &str) {
        self.0.push_str(setting);
        self.0.push('\n');
    }

    /// Adds a setting with a value.
    ///
    /// # Errors
    /// When the file cannot have the value, because it has quotes or line breaks.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> io::Result<()> {
        if value.contains(['"', '\n']) {
            let why = format!("CRIU's setting {name} cannot have quotes or line breaks: {value:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let _ = writeln!(self.0, "{name} \"{value}\"");
        Ok(())
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_those_of_criu() {
        // As `protoc --encode=criu_req` has them.
        let dump = request(Task::Dump { pid: 7 }, "/c");
        let options = b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x10\x07\x48\x01\x60\x01\x9a\x03\x02/c";
        assert_eq!(dump, [&b"\x08\x01\x12\x16"[..], options].concat());
        assert!(request(Task::Restore { removes_names: false }, "/c").starts_with(b"\x08\x02"));
        assert_eq!(answer(true), b"\x08\x06\x18\x01");
        assert_eq!(answer(false), b"\x08\x06\x18\x00");
        let step_of = |message: &[u8]| step(message).unwrap();
        let at = |step: &str, pid| Some((step.to_owned(), pid));
        assert_eq!(step_of(b"\x08\x06\x10\x01\x2a\x0a\x0a\x08pre-dump"), at("pre-dump", 0));
        assert_eq!(step_of(b"\x08\x06\x10\x01\x2a\x06\x0a\x02go\x10\x09"), at("go", 9));
        assert_eq!(step_of(b"\x08\x01\x10\x01\x1a\x02\x08\x00"), None);
        assert!(step(b"\x0f").is_err());
    }

    #[test]
    fn values_are_quoted() {
        let mut settings = CriuSettings::new();
        settings.set("root", "/a path/#1").unwrap();
        assert!(settings.text().ends_with("\nroot \"/a path/#1\"\n"));
        for bad in ["/\"", "/\n"] {
            assert_eq!(
                settings.set("root", bad).unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
        }
    }
}
