//! How requests come in and answers go out. It knows no route: [`server`] hands requests to a [`server::Handler`].

pub(crate) mod encoding;
pub(crate) mod http;
pub(crate) mod messages;
pub(crate) mod rpc;
pub(crate) mod server;
