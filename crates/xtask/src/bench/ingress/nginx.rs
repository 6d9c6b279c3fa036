//! nginx as a reverse proxy, configured for speed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::bench::host::Process;

/// nginx, as a child of this process.
pub(super) struct Nginx {
    pub(super) address: SocketAddr,
    /// Master process of nginx.
    pub(super) process: Process,
    child: Child,
    _directory: TempDir,
}

impl Nginx {
    /// Starts nginx as a reverse proxy before a server.
    ///
    /// # Errors
    /// When it is missing or does not listen within five seconds.
    pub(super) fn start(program: &Path, server: SocketAddr) -> Result<Self> {
        let directory = TempDir::with_prefix("ringfence-bench-nginx-")?;
        // Free until nginx takes it, unless another program is faster; nginx fails then.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let configuration = directory.path().join("nginx.conf");
        std::fs::write(&configuration, text(directory.path(), address, server))?;
        let child = Command::new(program)
            .arg("-e")
            .arg(directory.path().join("error.log"))
            .arg("-c")
            .arg(&configuration)
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("run {} (Debian: nginx-light)", program.display()))?;
        let nginx = Self {
            address,
            process: Process(child.id()),
            child,
            _directory: directory,
        };
        for _ in 0..100 {
            if TcpStream::connect(address).is_ok() {
                return Ok(nginx);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("nginx does not listen at {address}");
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // SIGTERM, so that the master ends its workers.
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

fn text(directory: &Path, address: SocketAddr, server: SocketAddr) -> String {
    let directory = directory.display();
    format!(
        "user root;\ndaemon off;\nworker_processes 2;\npid {directory}/pid;\nerror_log {directory}/error.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n\
           access_log off;\nsendfile on;\ntcp_nodelay on;\nkeepalive_requests 100000000;\n\
           client_body_temp_path {directory}/body;\nproxy_temp_path {directory}/proxy;\n\
           fastcgi_temp_path {directory}/fastcgi;\nuwsgi_temp_path {directory}/uwsgi;\n\
           scgi_temp_path {directory}/scgi;\n\
           upstream server {{ server {server}; keepalive 64; keepalive_requests 100000000; }}\n\
           server {{\n\
             listen {address};\n\
             location / {{ proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection \"\";\n\
               proxy_max_temp_file_size 0; }}\n\
             location /echo {{ proxy_pass http://server; proxy_http_version 1.1; proxy_read_timeout 1h;\n\
               proxy_set_header Connection \"upgrade\"; proxy_set_header Upgrade $http_upgrade; }}\n\
           }}\n\
         }}\n"
    )
}
