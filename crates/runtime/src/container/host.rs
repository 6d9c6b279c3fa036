//! What the driver finds out about the host when it starts.

use crate::egress::EgressSockets;

/// Whether this kernel can deliver what sandboxes send to a gateway.
pub(super) fn egress_support() -> bool {
    match EgressSockets::probe() {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!("sandboxes have no network: the kernel refuses a BPF program of type sk_lookup: {error}");
            false
        }
    }
}
