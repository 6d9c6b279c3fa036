//! Keys of what sandboxes are made of: repositories, builds, the bucket of layers, and signed requests.

use server::settings::RepositorySettings;

use crate::config::builds;
use crate::config::key::{Key, Kind, set};
use crate::config::values::{MAX, boolean, mib, number, schemes};

keys! {
    REPOSITORIES_CLONE_TIMEOUT_S = {
        "repositories.clone_timeout_s", None, Integer, "45",
        "Maximum time that a create request waits for its repositories, in seconds, from 1 to 50.",
        repositories.clone_timeout_s = number(1, RepositorySettings::CLONE_TIMEOUT_MAX_S),
    },
    REPOSITORIES_SOFT_AGE_S = {
        "repositories.soft_age_s", None, Integer, "300",
        "Age from which the copy of a repository that lacks something is replaced, in seconds.",
        repositories.soft_age_s = number(0, MAX),
    },
    REPOSITORIES_HARD_AGE_S = {
        "repositories.hard_age_s", None, Integer, "86400",
        "Age from which the copy of a repository is not used any more, in seconds.",
        repositories.hard_age_s = number(0, MAX),
    },
    REPOSITORIES_COPY_MB = {
        "repositories.copy_mb", None, Integer, "512",
        "Maximum size of the copy of one repository, in MiB.",
        repositories.bundle_bytes = mib(0),
    },
    REPOSITORIES_TEAM_MB = {
        "repositories.team_mb", None, Integer, "2048",
        "Maximum size of the copies of the repositories of one team, in MiB.",
        repositories.team_bytes = mib(0),
    },
    REPOSITORIES_TOTAL_MB = {
        "repositories.total_mb", None, Integer, "8192",
        "Maximum size of the copies of all repositories, in MiB; 0 keeps none.",
        repositories.total_bytes = mib(0),
    },
    BUILDS_CONCURRENT = {
        "builds.concurrent", None, Integer, "2",
        "How many builds of templates run at the same time, at least 1. Others wait for their turn.",
        builds.concurrent = number(1, MAX),
    },
    BUILDS_FILE_MB = {
        "builds.file_mb", None, Integer, "2048",
        "Maximum size of the files that one step of a build copies, as they are uploaded, in MiB.",
        builds.file_bytes = mib(0),
    },
    BUILDS_TEAM_FILES_MB = {
        "builds.team_files_mb", None, Integer, "20480",
        "Maximum size of all uploaded files of a team, in MiB.",
        builds.team_files_bytes = mib(0),
    },
    BUILDS_FILE_AGE_S = {
        "builds.file_age_s", None, Integer, "604800",
        "How long uploaded files are kept after their last use, in seconds, at least 60.",
        builds.file_age_s = number(60, MAX),
    },
    BUILDS_CACHE_AGE_S = {
        "builds.cache_age_s", None, Integer, "604800",
        "How long the result of a step is kept for later builds after its last use, in seconds, at least 60.",
        builds.cache_age_s = number(60, MAX),
    },
    BUILDS_CACHE_MB = {
        "builds.cache_mb", None, Integer, "20480",
        "Approximate maximum size of all results of steps that are kept for later builds, in MiB. What templates \
         consist of is not limited by this.",
        builds.cache_bytes = mib(0),
    },
    BUILDS_REGISTRY_MIRRORS = {
        "builds.registry_mirrors", None, Text, "none",
        "Comma-separated registries from which images are fetched instead of others, such as `docker.io=mirror.example:5000`.",
        builds.registry_mirrors = builds::mirrors,
    },
    BUILDS_INSECURE_REGISTRIES = {
        "builds.insecure_registries", None, Text, "none",
        "Comma-separated registries, host or host:port, that are reached without TLS.",
        builds.insecure_registries = builds::hosts,
    },
    BUILDS_REGISTRY_CA_FILES = {
        "builds.registry_ca_files", None, Text, "none",
        "Comma-separated files with certificates of issuers, in PEM, that a registry may have besides those of the \
         system, such as `registry.example:5000=/etc/ssl/registry.pem`.",
        registry_ca_files = builds::ca_files,
    },
    BLOBS_STORE = {
        "blobs.store", None, Text, "local",
        "Where layers of templates and uploaded files are kept: local for the data directory only, or s3 for a bucket besides it.",
    },
    BLOBS_BUCKET = {
        "blobs.bucket", None, Text, "none",
        "Name of the bucket, which must exist. Required with s3.",
    },
    BLOBS_ENDPOINT = {
        "blobs.endpoint", None, Text, "that of Amazon S3 in blobs.region",
        "Address of the S3 server, such as https://s3.example:9000.",
    },
    BLOBS_REGION = {
        "blobs.region", None, Text, "us-east-1",
        "Region of the bucket.",
    },
    BLOBS_PREFIX = {
        "blobs.prefix", None, Text, "ringfence",
        "What the names of all objects begin with. Belongs to one database: another one is refused.",
    },
    BLOBS_ACCESS_KEY_ID = {
        "blobs.access_key_id", None, Text, "none",
        "Name of the access key. Required with s3.",
    },
    BLOBS_SECRET_ACCESS_KEY_FILE = {
        "blobs.secret_access_key_file", None, Text, "none",
        "File with the secret access key. The key can also be in the variable RINGFENCE_BLOBS_SECRET_ACCESS_KEY.",
    },
    BLOBS_ALLOW_HTTP = {
        "blobs.allow_http", None, Boolean, "false",
        "Whether blobs.endpoint may be an address without TLS.",
    },
    BLOBS_PATH_STYLE = {
        "blobs.path_style", None, Boolean, "true with blobs.endpoint, else false",
        "Whether the bucket is in the path of requests, and not in the name of the host.",
    },
    BLOBS_CA_FILE = {
        "blobs.ca_file", None, Text, "none",
        "File in PEM with CA certificates that the S3 server may be signed by, besides those of the host.",
    },
    BLOBS_GRACE_S = {
        "blobs.grace_s", None, Integer, "86400",
        "How long an object that nothing refers to is kept, in seconds. Must be longer than a build takes if several \
         nodes share the database.",
    },
    BLOBS_CACHE_MB = {
        "blobs.cache_mb", None, Integer, "no limit",
        "Maximum size of the layers in the data directory, and of the memory of snapshots that a node has fetched, each in MiB. \
         What was not used for long is removed from it if it is in the bucket, and comes back when it is needed.",
    },
    SIGNING_SCHEMES = {
        "signing.schemes", None, Text, "Ringfence,Qiniu,Sufy",
        "Comma-separated words of the header Authorization that announce a signed request, such as Qiniu in \
         `Authorization: Qiniu <access key>:<signature>`.",
        signing.schemes = schemes,
    },
    SIGNING_REQUIRE_DATE = {
        "signing.require_date", None, Boolean, "false",
        "Whether a signature must cover a date. Without one, whoever sees a signed request can send it again.",
        signing.require_date = boolean,
    },
    SIGNING_REQUIRED_FOR_RULES = {
        "signing.required_for_rules", None, Boolean, "false",
        "Whether operations on injection rules must be signed with an access key; an API key is not enough then.",
        signing.required_for_rules = boolean,
    },
}
