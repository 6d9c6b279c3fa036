//! The resolver that answers the DNS queries of sandboxes.
