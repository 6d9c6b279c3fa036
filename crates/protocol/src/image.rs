//! Jobs of the programs that prepare the file system of a template: `image-pull`, `image-unpack`, `image-copy` and
//! `image-provision`, hidden subcommands of the binary that every sandbox has as its agent.
//!
//! They run inside a sandbox, as its root. A program gets the path of a file with its job as JSON and deletes the file
//! as soon as it is read, because a job may hold credentials. It writes lines of JSON to stdout, each a [`Progress`];
//! the last one is the result. It ends with 0, or with 1 and one line on stderr, which may be shown to the user.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Maximum size of a job file in bytes.
pub const JOB_BYTES_MAX: u64 = 1 << 20;

/// A secret of a job. `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobSecret(String);

impl JobSecret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

/// Limits of what is unpacked. The free space of the disk is a limit as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UnpackLimits {
    /// Bytes of file contents.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self {
            bytes: 25_000_000_000,
            entries: 4_000_000,
        }
    }
}

/// Job of `image-copy`: a COPY or ADD step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyJob {
    /// The uploaded archive: tar or tar.gz. Without `from`, required.
    #[serde(default)]
    pub archive: PathBuf,
    /// Root of a file system to copy from, instead of an archive. Its links are followed as if it were the root.
    #[serde(default)]
    pub from: Option<PathBuf>,
    /// First argument of the step, as sent; a path in the archive, from the first glob character on ignored.
    #[serde(default)]
    pub source: String,
    /// Sources as a Dockerfile has them, with patterns, instead of `source`.
    #[serde(default)]
    pub patterns: Vec<String>,
    /// Second argument of the step.
    pub dest: String,
    /// Base of a relative `dest`; without one, the home directory of `user`.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Current user of the build: `user[:group]`, each a name or a number.
    pub user: String,
    /// Third argument of the step: `user`, `user:group` or numeric ids. Empty and absent mean `user`; with `from`, that
    /// owners stay as they are.
    #[serde(default)]
    pub owner: Option<String>,
    /// Fourth argument of the step: mode in octal digits. Empty and absent mean the modes in the archive.
    #[serde(default)]
    pub mode: Option<String>,
    /// What may be unpacked.
    #[serde(default)]
    pub limits: UnpackLimits,
    /// Root of the file system that is changed.
    #[serde(default = "root")]
    pub root: PathBuf,
    /// Directory below which the archive is unpacked for the time of the step.
    #[serde(default = "work")]
    pub work: PathBuf,
    /// Whether the archive is deleted as soon as it is open, so that no layer has it.
    #[serde(default)]
    pub consume: bool,
}

/// Job of `image-provision`: creates a user, and with `prepare` also what every template must have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionJob {
    /// The user, `user[:group]`, each a name or a number. One that exists is kept as it is, one by name is created, and a
    /// group must exist.
    pub user: String,
    /// Whether the user may become root without a password.
    #[serde(default)]
    pub admin: bool,
    /// Whether the image is prepared as a template: `/code`, `/usr/local`, home directory, machine id.
    #[serde(default)]
    pub prepare: bool,
    /// Whether nothing is done but what a user who exists needs for interpreters that a step has installed.
    #[serde(default)]
    pub only_interpreters: bool,
    /// Root of the file system that is changed.
    #[serde(default = "root")]
    pub root: PathBuf,
}

/// Job of `image-pull`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullJob {
    /// The image as the client named it, such as `debian`, `ghcr.io/owner/name:tag` or `host/name@sha256:…`.
    pub reference: String,
    /// Whether the program only determines the digest of the manifest, and unpacks nothing.
    #[serde(default)]
    pub resolve: bool,
    /// Existing directory into which the image is unpacked.
    #[serde(default = "target")]
    pub target: PathBuf,
    /// Directory for downloaded layers, on a disk with space; layers are deleted when unpacked.
    #[serde(default = "work")]
    pub work: PathBuf,
    /// Credentials for the registry of the image.
    #[serde(default)]
    pub credentials: Option<Credentials>,
    /// Credentials for registries by their host, of which those for the registry of the image are used.
    #[serde(default)]
    pub logins: BTreeMap<String, Credentials>,
    /// Architecture as OCI names it, such as `amd64`; default: that of this machine.
    #[serde(default)]
    pub arch: Option<String>,
    /// Registries to ask instead, in order, before the registry itself: by its host, such as `docker.io`. Credentials
    /// are never sent to them.
    #[serde(default)]
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// Registries, `host` or `host:port`, with plain HTTP.
    #[serde(default)]
    pub insecure: Vec<String>,
    /// Certificates in PEM to trust besides those of the system, by registry, `host` or `host:port`.
    #[serde(default)]
    pub authorities: BTreeMap<String, String>,
    /// What may be unpacked.
    #[serde(default)]
    pub limits: UnpackLimits,
    /// Timeouts, retries and endpoints.
    #[serde(default)]
    pub transfer: Transfer,
}

/// How `image-pull` talks to servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transfer {
    /// Time for connecting and until the headers of a response, in milliseconds.
    pub request_timeout_ms: u64,
    /// Time between two pieces of a response, in milliseconds.
    pub stall_timeout_ms: u64,
    /// Attempts per request or layer, the first included.
    pub attempts: u32,
    /// Delay before the second attempt in milliseconds; doubled for each further one.
    pub backoff_ms: u64,
    /// Layers that are downloaded at the same time.
    pub parallel: usize,
    /// Endpoint of ECR instead of `https://api.ecr.<region>.amazonaws.com/`.
    pub aws_endpoint: Option<String>,
    /// Token endpoint of GCP instead of the one in the key of the service account.
    pub gcp_endpoint: Option<String>,
}

impl Default for Transfer {
    fn default() -> Self {
        Self {
            request_timeout_ms: 30_000,
            stall_timeout_ms: 30_000,
            attempts: 5,
            backoff_ms: 500,
            parallel: 3,
            aws_endpoint: None,
            gcp_endpoint: None,
        }
    }
}

/// Credentials for a registry: `fromImageRegistry` of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Credentials {
    /// User name and password, or a token of the registry.
    Registry {
        /// User name.
        username: String,
        /// Password or token.
        password: JobSecret,
    },
    /// Access key of AWS, exchanged for a password of ECR.
    Aws {
        /// Access key id.
        #[serde(rename = "awsAccessKeyId")]
        access_key_id: String,
        /// Secret access key.
        #[serde(rename = "awsSecretAccessKey")]
        secret_access_key: JobSecret,
        /// Region of the registry.
        #[serde(rename = "awsRegion")]
        region: String,
    },
    /// Key of a service account of GCP, exchanged for an access token.
    Gcp {
        /// The JSON file of the key.
        #[serde(rename = "serviceAccountJson")]
        service_account_json: JobSecret,
    },
}

/// Job of `image-unpack`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnpackJob {
    /// The file: an archive of `docker save`, an OCI archive, or a tarball of a root file system; plain, gzip or zstd.
    pub archive: PathBuf,
    /// Existing directory into which the image is unpacked.
    #[serde(default = "target")]
    pub target: PathBuf,
    /// Directory for the layers of the archive, on a disk with space.
    #[serde(default = "work")]
    pub work: PathBuf,
    /// The image of an archive with several: its tag, such as `name:tag`.
    #[serde(default)]
    pub reference: Option<String>,
    /// Architecture as OCI names it; default: that of this machine.
    #[serde(default)]
    pub arch: Option<String>,
    /// What may be unpacked.
    #[serde(default)]
    pub limits: UnpackLimits,
}

/// One line that a program writes to stdout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Progress {
    /// A line for the log of the build.
    Log {
        /// Text of a line for the log of the build.
        message: String,
    },
    /// What goes on, for the log of the build at level debug.
    State {
        /// The text.
        message: String,
    },
    /// Result of `image-pull` with `resolve`.
    Resolved {
        /// Digest of the manifest for this architecture.
        digest: String,
    },
    /// Result of `image-pull` and `image-unpack`.
    Unpacked(ImageReport),
    /// Result of `image-copy`.
    Copied(CopyReport),
    /// Result of `image-provision`.
    Provisioned(ProvisionReport),
}

/// An unpacked image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageReport {
    /// Digest of the manifest; none for an archive without one.
    pub digest: Option<String>,
    /// Architecture; none for a tarball of a root file system.
    pub arch: Option<String>,
    /// Environment, in order; entries without a name are dropped.
    pub env: Vec<(String, String)>,
    /// User of the image, as it is in its configuration.
    pub user: Option<String>,
    /// Working directory of the image.
    pub workdir: Option<String>,
    /// Entry point.
    pub entrypoint: Vec<String>,
    /// Command.
    pub cmd: Vec<String>,
    /// Layers, lowest first.
    pub layers: Vec<LayerReport>,
    /// Bytes of file contents that were unpacked.
    pub bytes: u64,
    /// Files, directories and links that were unpacked.
    pub entries: u64,
    /// What could not be unpacked.
    pub skipped: Skipped,
}

/// A layer of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerReport {
    /// Digest of the layer as it was downloaded.
    pub digest: String,
    /// Size of the layer as it was downloaded, in bytes.
    pub bytes: u64,
}

/// Counts of what an image has and a sandbox cannot have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Skipped {
    /// Device nodes.
    pub devices: u64,
    /// Entries whose owner is outside the id range of the sandbox; they belong to root.
    pub owners: u64,
    /// Extended attributes, by name.
    pub xattrs: BTreeMap<String, u64>,
}

/// Result of a COPY step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CopyReport {
    /// Files, directories and links that were written.
    pub entries: u64,
    /// Bytes of file contents.
    pub bytes: u64,
}

/// Result of `image-provision`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProvisionReport {
    /// User id of the user.
    pub uid: u32,
    /// Primary group of the user.
    pub gid: u32,
    /// Home directory of the user.
    pub home: String,
    /// Shell of the user.
    pub shell: String,
    /// Whether the user was created.
    pub created: bool,
    /// Tool by which packages are installed; none if the image is of no known family.
    pub packages: Option<PackageTool>,
    /// `ID` of `/etc/os-release`.
    pub os: Option<String>,
    /// Packages that the image lacks, by the names that its family has for them: of `bash`, `sudo` and
    /// `ca-certificates`.
    pub missing: Vec<String>,
    /// Packages that start and ready commands of many templates need and the image lacks, by the names that its family
    /// has for them: `curl` and the package of `ss`.
    pub wanted: Vec<String>,
}

/// Tools of the known families of distributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackageTool {
    /// Debian, Ubuntu.
    AptGet,
    /// Alpine.
    Apk,
    /// Fedora, CentOS, Rocky, AlmaLinux.
    Dnf,
    /// Arch.
    Pacman,
}

fn root() -> PathBuf {
    PathBuf::from("/")
}

fn work() -> PathBuf {
    PathBuf::from("/var/tmp")
}

fn target() -> PathBuf {
    PathBuf::from("/mnt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_jobs_have_defaults_and_secrets_are_not_shown() {
        let job: PullJob = serde_json::from_str(
            r#"{"reference":"debian","credentials":{"type":"aws","awsAccessKeyId":"a","awsSecretAccessKey":"hidden","awsRegion":"r"}}"#,
        )
        .unwrap();
        assert_eq!(job.target, PathBuf::from("/mnt"));
        assert_eq!(job.transfer, Transfer::default());
        assert!(!format!("{job:?}").contains("hidden"));
        let again: PullJob = serde_json::from_str(&serde_json::to_string(&job).unwrap()).unwrap();
        assert_eq!(again, job);
        let job: CopyJob = serde_json::from_str(r#"{"archive":"/a","source":".","dest":"b","user":"user"}"#).unwrap();
        assert_eq!(job.root, PathBuf::from("/"));
        assert!(
            serde_json::from_str::<CopyJob>(r#"{"archive":"/a","source":".","dest":"b","user":"u","x":1}"#).is_err()
        );
    }

    #[test]
    fn lines_have_their_type() {
        let line = serde_json::to_string(&Progress::Copied(CopyReport { entries: 1, bytes: 2 })).unwrap();
        assert_eq!(line, r#"{"type":"copied","entries":1,"bytes":2}"#);
    }
}
