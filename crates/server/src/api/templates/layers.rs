//! The layers of a build, with the space that each takes.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use protocol::node::Image;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::NotOwnBuild;
use super::status::BuildPath;
use crate::api::auth::Caller;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::builds::Builds;
use crate::builds::recipe::BuildSpec;

/// A layer of a build.
#[derive(Serialize, ToSchema)]
struct BuildLayer {
    /// The id of the layer. Builds with the same steps share it.
    #[serde(rename = "layerID")]
    layer_id: String,
    /// The space that it takes on the disk of the host, in bytes; absent where the host does not have it now.
    #[serde(rename = "sizeBytes", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    bytes: Option<u64>,
}

/// The layers of a build.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct BuildLayers {
    /// Whether they lie above the programs of the host, as those of `base` do.
    has_base: bool,
    /// The layers, lowest first; none of a build that has not succeeded.
    layers: Vec<BuildLayer>,
}

/// Returns the layers of a build, lowest first, and how much space each takes. A layer that several builds have is stored once.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/builds/{buildID}/layers",
    tag = "templates",
    params(BuildPath),
    responses((status = 200, description = "The layers", body = BuildLayers), NotOwnBuild)
)]
pub(crate) async fn list_build_layers(
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    path: BuildPath,
) -> Result<Response, ApiError> {
    let (_, build) = path.find(&caller, &builds).await?;
    let spec = build.spec_json.as_deref().map(serde_json::from_str::<BuildSpec>);
    let spec = spec.transpose().map_err(ApiError::failed)?;
    let (has_base, own) = match spec.map(|spec| spec.image) {
        Some(Image::Layers { base, layers }) => (base, layers),
        Some(Image::Base | Image::Import | Image::Copy { .. }) => (true, Vec::new()),
        None => (false, Vec::new()),
    };
    let sizes: HashMap<_, _> = if own.is_empty() {
        HashMap::new()
    } else {
        let stored = builds.layers().await.map_err(ApiError::failed)?;
        stored.into_iter().map(|layer| (layer.id, layer.bytes)).collect()
    };
    let layers = own.into_iter().map(|id| BuildLayer {
        bytes: sizes.get(&id).copied(),
        layer_id: id.as_str().to_owned(),
    });
    let layers = BuildLayers {
        has_base,
        layers: layers.collect(),
    };
    json(StatusCode::OK, &layers)
}
