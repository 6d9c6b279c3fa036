//! The command line of `server` and `node`.

use clap::{Args, Subcommand};

use super::listen::{ListenArg, TlsArgs};
use crate::config::keys::{self, Key};
use crate::output::Format;

/// Flags of `server`.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    listen: ListenArg,
    /// Address and port to which nodes connect; port 0 selects a free port
    /// [env: RINGFENCE_NODES_LISTEN] [default: 127.0.0.1:3100]
    #[arg(long, value_name = "ADDRESS")]
    nodes_listen: Option<String>,
    /// Where other servers on the same database, which must be PostgreSQL, reach that port of this one, https://<host>:<port>
    /// [env: RINGFENCE_NODES_ADDRESS] [default: none]
    #[arg(long, value_name = "ADDRESS")]
    nodes_address: Option<String>,
    /// Address and port on which metrics for Prometheus are served, such as 127.0.0.1:9464; port 0 selects a free port
    /// [env: RINGFENCE_METRICS_LISTEN] [default: none]
    #[arg(long, value_name = "ADDRESS")]
    metrics_listen: Option<String>,
    /// Domain of sandboxes, whose host names are <port>-<id>.<domain>
    /// [env: RINGFENCE_DOMAIN] [default: sandbox.localhost:<port of --listen>]
    #[arg(long, value_name = "DOMAIN")]
    domain: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

impl ServerArgs {
    /// The flags that set configuration keys.
    pub(super) fn flags(&self) -> impl Iterator<Item = (&'static Key, &Option<String>)> {
        let own = [
            (keys::LISTEN, &self.listen.listen),
            (keys::NODES_LISTEN, &self.nodes_listen),
            (keys::NODES_ADDRESS, &self.nodes_address),
            (keys::METRICS_LISTEN, &self.metrics_listen),
            (keys::DOMAIN, &self.domain),
        ];
        own.into_iter().chain(self.tls.flags())
    }
}

/// The subcommand of `node`, if there is one.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    #[command(subcommand)]
    pub(crate) command: Option<NodeCommand>,
}

/// Subcommands of `node`.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// Make this host the node of a server, or of several on one database; the host needs no open port
    ///
    /// Makes a key, and gets a certificate for it from the server, which renews it. The token also says which server it is:
    /// no other one is trusted. With several addresses, the node connects to one of the servers, and to another one when that
    /// does not answer.
    Join {
        /// Addresses of the server, or of each server, for nodes, https://<host>:<port>, see its --nodes-listen
        #[arg(required = true, num_args = 1..=16)]
        servers: Vec<String>,
        /// Token of `ringfence node token` on the server; `-`, or without this flag, it is read from standard input. Others on
        /// this host can see flags: a token is good once
        #[arg(long, value_name = "TOKEN")]
        token: Option<String>,
    },
    /// Make a token with which one node can join within an hour, and print it; requires a running server
    Token {
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// List the nodes that have joined; requires a running server
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Show one node; requires a running server
    Show {
        /// ID of the node
        id: String,
        /// Output format
        #[arg(long, value_enum, default_value_t = Format::Text)]
        format: Format,
    },
    /// Have a node get no new sandboxes, such as before its host is restarted; requires a running server
    ///
    /// What is there goes on, and can be used, paused, resumed and killed. Restarts of servers and of the node change nothing;
    /// `ringfence node undrain` does.
    Drain {
        /// ID of the node
        id: String,
        /// Wait until nothing is left there that a restart of its host would end
        #[arg(long)]
        wait: bool,
        /// Wait for that, and pause what is left after this time, on the disk of the node: with its processes where it has CRIU,
        /// and otherwise its files alone
        #[arg(long, value_name = "SECONDS", conflicts_with = "wait")]
        within: Option<u32>,
    },
    /// Have a node that drains get new sandboxes again; requires a running server
    Undrain {
        /// ID of the node
        id: String,
    },
    /// Forget a node: its connection ends, its certificate is refused, and another one can join; requires a running server
    ///
    /// Its sandboxes go on until `ringfence down` on its host. If it joins again, the server takes them over; if another node
    /// does, they count as lost.
    Forget {
        /// ID of the node
        id: String,
    },
}
