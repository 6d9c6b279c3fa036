//! The lifecycle settings of sandboxes in their rows.

use model::sandbox::LifecycleSpec;
use store::sandboxes::SandboxRow;

/// The lifecycle settings of a row. With invalid content they are the default.
pub(crate) fn lifecycle_of(row: &SandboxRow) -> LifecycleSpec {
    let text = row.lifecycle_json.as_deref();
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// The column of lifecycle settings; none for those that every sandbox has without a request.
pub(super) fn to_json(lifecycle: LifecycleSpec) -> Option<String> {
    let is_default = !lifecycle.auto_pause && !lifecycle.auto_resume;
    (!is_default).then(|| serde_json::to_string(&lifecycle).expect("flags and a number are JSON"))
}
