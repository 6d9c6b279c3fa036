//! Flags of what listens, which several commands have.

use clap::Args;

use crate::config::keys::{self, Key};

/// Flags of HTTPS.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// Serve HTTPS besides HTTP on the same port; without --tls-cert and acme.directory, the certificate is issued by a
    /// local CA in the data directory [env: RINGFENCE_TLS] [default: false, or true with tls_cert or acme.directory]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tls: Option<String>,
    /// Certificate chain in PEM, server certificate first; reloaded when it changes
    /// [env: RINGFENCE_TLS_CERT] [default: none]
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<String>,
    /// Private key of the server certificate in PEM
    /// [env: RINGFENCE_TLS_KEY] [default: none]
    #[arg(long, value_name = "FILE")]
    tls_key: Option<String>,
}

impl TlsArgs {
    /// The flags that set configuration keys.
    pub(super) fn flags(&self) -> [(&'static Key, &Option<String>); 3] {
        [
            (keys::TLS, &self.tls),
            (keys::TLS_CERT, &self.tls_cert),
            (keys::TLS_KEY, &self.tls_key),
        ]
    }
}

/// The flag `--listen`.
#[derive(Debug, Args)]
pub(crate) struct ListenArg {
    /// Address and port of the API and of sandbox traffic; port 0 selects a free port
    /// [env: RINGFENCE_LISTEN] [default: 127.0.0.1:3000]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) listen: Option<String>,
}
