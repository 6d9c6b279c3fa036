//! `POST /init`, by which the host sets the agent up.
//!
//! It is served on the inherited connection and on the control socket, never on TCP: code in the sandbox must not
//! set up its own agent anew, least of all without a token.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use protocol::agent::{Init, VERSION, VERSION_HEADER};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::given;
use crate::settings::AgentSettings;
use crate::transport::http::{self as answers, Body};
use crate::transport::messages::MessageMemory;
use crate::trust::{self, Bundle, Trust};

/// Where programs look for signs of the sandbox.
const BOOT_DIRECTORY: &str = "/run/e2b";

/// The service behind the control routes that set the agent up.
pub(crate) struct Control {
    settings: Rc<RefCell<AgentSettings>>,
    memory: MessageMemory,
    /// Held while an `/init` is applied.
    initializing: Arc<tokio::sync::Mutex<()>>,
    tasks: TaskTracker,
}

impl Control {
    pub(crate) fn new(settings: Rc<RefCell<AgentSettings>>, memory: MessageMemory, tasks: TaskTracker) -> Self {
        Self {
            settings,
            memory,
            initializing: Arc::default(),
            tasks,
        }
    }

    /// `POST /init`: takes over the settings. Repeating it is harmless, and a late repetition changes nothing.
    pub(crate) async fn init(&self, request: Request<Incoming>) -> Response<Body> {
        let applied = match self.memory.read(request.into_body()).await {
            Ok(message) => self.apply(&message.bytes).await,
            Err(error) => Err(Refusal::new(StatusCode::BAD_REQUEST, &error.message)),
        };
        let mut response = match applied {
            Ok(()) => answers::no_content(),
            Err(refusal) => answers::text(refusal.status, &refusal.message),
        };
        response
            .headers_mut()
            .insert(VERSION_HEADER, HeaderValue::from_static(VERSION));
        response
    }

    async fn apply(&self, body: &[u8]) -> Result<(), Refusal> {
        let bad = |reason: &str| Refusal::new(StatusCode::BAD_REQUEST, reason);
        let mut init: Init = match body {
            [] => Init::default(),
            // A derived reader would also take an array for a struct.
            body if body.trim_ascii_start().first() != Some(&b'{') => return Err(bad("the body is not a JSON object")),
            // Not what the reader says: it would quote values, which may be secrets.
            body => {
                serde_json::from_slice(body).map_err(|_| bad("the body is not the JSON object that /init takes"))?
            }
        };
        let bundle = init.ca_bundle.take().filter(|text| !text.is_empty());
        let bundle = bundle.map(|text| Bundle::parse(&text)).transpose();
        let bundle = bundle.map_err(|error| bad(&format!("failed to install CA bundle: {error}")))?;
        // One at a time: the settings must be those of the call whose certificate was installed last.
        let turn = Arc::clone(&self.initializing).lock_owned().await;
        if self
            .settings
            .borrow()
            .is_stale(&init)
            .map_err(|error| bad(&error.to_string()))?
        {
            return Ok(());
        }
        let is_deferred = init.ca_bundle_deferred;
        let (now, later) = if is_deferred { (None, bundle) } else { (bundle, None) };
        let trust = match now {
            Some(bundle) => {
                let trust = install(bundle.clone()).await?;
                install_more(bundle).await;
                Some(trust)
            }
            None => None,
        };
        let mut settings = self.settings.borrow_mut();
        settings.apply(init).map_err(|error| bad(&error.to_string()))?;
        if let Some(trust) = trust {
            settings.trust(trust);
        }
        // Before the certificate is installed in the background, which uses the same name for what is not complete.
        // A sandbox whose disk is full, or whose root has put something else there, works all the same.
        let _ = match settings.given() {
            Some(given) => given::publish(Path::new("/"), &given, &settings.default_user),
            None => given::withdraw(Path::new("/")),
        };
        if let Some(bundle) = later {
            let (done, installed) = watch::channel(());
            settings.defer_trust(installed);
            let settings = Rc::clone(&self.settings);
            self.tasks.spawn_local(async move {
                // Until it is done, no other call is applied.
                let _turn = turn;
                // Without the certificate, programs refuse intercepted connections: nothing worse.
                if let Ok(trust) = install(bundle.clone()).await {
                    settings.borrow_mut().trust(trust);
                }
                drop(done);
                // Java takes longer than this to start.
                install_more(bundle).await;
            });
        }
        // Signs, not settings: an image in which they cannot be written works all the same.
        let _ = write_boot_files(Path::new(BOOT_DIRECTORY), &settings.boot_files());
        Ok(())
    }
}

/// Why an `/init` was not applied.
struct Refusal {
    status: StatusCode,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, reason: &str) -> Self {
        Self {
            status,
            message: reason.to_owned(),
        }
    }
}

/// Installs a CA certificate, off the one thread: a slow disk must not hold up anything else.
async fn install(bundle: Bundle) -> Result<Trust, Refusal> {
    let failed = |error: io::Error| {
        let reason = format!("failed to install CA bundle: {error}");
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, &reason)
    };
    tokio::task::spawn_blocking(move || trust::install(Path::new("/"), &bundle))
        .await
        .map_err(|error| failed(io::Error::other(error)))?
        .map_err(failed)
}

/// Installs CA certificates in the stores that only some programs read.
async fn install_more(bundle: Bundle) {
    // What is missing then is a convenience.
    let _ = tokio::task::spawn_blocking(move || trust::install_more(Path::new("/"), &bundle)).await;
}

fn write_boot_files(directory: &Path, files: &[(&str, Option<&str>)]) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o755).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for (name, content) in files {
        let Some(content) = content else { continue };
        let path = directory.join(name);
        // Made anew rather than opened, so that nothing the sandbox put there is followed or waited for.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o444)
            .open(&path)?;
        file.write_all(content.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_files_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let boot = directory.path().join("e2b");
        let victim = directory.path().join("victim");
        fs::write(&victim, "untouched").unwrap();
        write_boot_files(&boot, &[("a", Some("1")), ("b", None)]).unwrap();
        fs::remove_file(boot.join("a")).unwrap();
        std::os::unix::fs::symlink(&victim, boot.join("a")).unwrap();
        write_boot_files(&boot, &[("a", Some("2"))]).unwrap();
        assert_eq!(fs::read_to_string(boot.join("a")).unwrap(), "2");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert!(!boot.join("b").exists());
    }
}
