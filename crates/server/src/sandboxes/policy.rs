//! What sandboxes may reach: from the settings in a row to the policy that a node enforces.

use model::network::{Cidr, EgressPolicy};
use model::sandbox::NetworkSpec;
use serde_json::{Map, Value};
use store::sandboxes::SandboxRow;

/// The column of network settings.
pub(super) fn to_json(network: &NetworkSpec) -> String {
    serde_json::to_string(network).expect("flags and texts are always JSON")
}

/// The network settings of a row; none if the client requested none.
///
/// # Errors
/// When the column holds something else.
pub(crate) fn spec_of(row: &SandboxRow) -> Result<Option<NetworkSpec>, serde_json::Error> {
    let Some(text) = &row.network_json else {
        return Ok(None);
    };
    // Only an object: an array would be read as the settings in order, with defaults for those that are missing.
    let object: Map<String, Value> = serde_json::from_str(text)?;
    serde_json::from_value(Value::Object(object)).map(Some)
}

/// What the sandbox of a row may reach. With invalid settings it is nothing: what a client wanted closed must not be open.
pub(super) fn policy_of(row: &SandboxRow) -> EgressPolicy {
    let invalid = match spec_of(row) {
        Ok(network) => match network.unwrap_or_default().egress(row.allow_internet_access) {
            Ok(policy) => return policy,
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    tracing::error!(
        sandbox.id = %row.id,
        "invalid value in column network_json of sandboxes: the sandbox gets no network access: {invalid}"
    );
    EgressPolicy {
        deny: vec![Cidr::ALL],
        ..EgressPolicy::default()
    }
}
