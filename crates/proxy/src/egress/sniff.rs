//! The host name in the first bytes of a connection: TLS server name or HTTP host.
