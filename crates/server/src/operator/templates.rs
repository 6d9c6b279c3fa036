//! Templates as files, and the space of builds, for the operator.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Json};
use http::{StatusCode, Uri};
use http_body_util::{BodyDataStream, BodyExt as _};
use model::id::{LayerId, TeamId};
use protocol::node::NodeError;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;
use tokio_util::io::{ReaderStream, StreamReader};

use super::context::{ErrorResponse, FromServer, Operator, team_names};
use super::elsewhere;
use crate::builds::transfer::{Destination, Manifest, TransferError};
use crate::chain::Chain;
use crate::templates::TemplateName;

/// A template that was made of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorTemplate {
    /// Id of the template.
    pub template_id: String,
    /// The id of the build.
    pub build_id: String,
    /// What the operator should know.
    pub warning: Option<String>,
}

/// The space that builds of a team take on this node. What teams share counts for each of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OperatorSpace {
    /// Name of the team.
    pub team: String,
    /// Layers of its templates, and the memory of its snapshots, in bytes.
    pub template_bytes: u64,
    /// Layers that are kept for later builds and are not in a template, in bytes.
    pub cache_bytes: u64,
    /// Uploaded files, in bytes.
    pub file_bytes: u64,
}

/// A layer that nothing uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorLayer {
    /// Id of the layer.
    pub id: String,
    /// Space that the layer takes, in bytes.
    pub bytes: u64,
}

/// What a collection removed or would remove, and the space that is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorCollection {
    /// Layers that nothing uses.
    pub layers: Vec<OperatorLayer>,
    /// Number of results of steps that were removed.
    pub results: u64,
    /// Number of uploaded files that were removed.
    pub files: usize,
    /// The space of each team afterwards.
    pub teams: Vec<OperatorSpace>,
}

impl From<TransferError> for ErrorResponse {
    fn from(error: TransferError) -> Self {
        let status = match &error {
            TransferError::Refused(_) | TransferError::Invalid(_) | TransferError::Read(_) => StatusCode::BAD_REQUEST,
            TransferError::Layer {
                error: NodeError::Refused(_),
                ..
            } => StatusCode::BAD_REQUEST,
            TransferError::Store(_)
            | TransferError::Node(_)
            | TransferError::Objects(_)
            | TransferError::Layer { .. } => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, Chain(&error).to_string())
    }
}

fn of_node(error: &NodeError) -> ErrorResponse {
    let status = match error {
        NodeError::NoLayer(_) => StatusCode::NOT_FOUND,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    ErrorResponse(status, Chain(error).to_string())
}

fn bad(why: impl Into<String>) -> ErrorResponse {
    ErrorResponse(StatusCode::BAD_REQUEST, why.into())
}

async fn team_of(operator: &Operator, name: &str) -> Result<TeamId, ErrorResponse> {
    let names = team_names(operator).await?;
    let found = names.into_iter().find(|(_, known)| known == name);
    found
        .map(|(id, _)| id)
        .ok_or_else(|| ErrorResponse(StatusCode::NOT_FOUND, format!("there is no team {name:?}")))
}

/// Query parameters that name a template.
#[derive(Debug, Deserialize)]
pub(super) struct TemplateParameters {
    team: String,
    name: Option<String>,
    #[serde(default)]
    any_base: bool,
}

/// What a template consists of.
pub(super) async fn read_manifest(
    State(operator): State<Operator>,
    Query(wanted): Query<TemplateParameters>,
    of: Uri,
    from: Option<Extension<FromServer>>,
) -> Response {
    match manifest_of(&operator, wanted).await {
        Ok(manifest) => manifest.into_response(),
        Err(refused) if from.is_none() => elsewhere::read(&operator, &of, refused).await,
        Err(refused) => refused.into_response(),
    }
}

async fn manifest_of(operator: &Operator, wanted: TemplateParameters) -> Result<Json<Manifest>, ErrorResponse> {
    let team = team_of(operator, &wanted.team).await?;
    let text = wanted.name.unwrap_or_default();
    let name = TemplateName::parse(&text).map_err(|error| bad(error.to_string()))?;
    let (_, build) = name
        .find_build(&operator.store, &team)
        .await
        .map_err(|error| ErrorResponse(StatusCode::NOT_FOUND, Chain(&error).to_string()))?;
    Ok(Json(operator.builds.manifest(name.name, &build).await?))
}

/// A layer as an archive.
pub(super) async fn read_layer(
    State(operator): State<Operator>,
    Path(id): Path<String>,
    of: Uri,
    from: Option<Extension<FromServer>>,
) -> Response {
    match archive_of(&operator, &id).await {
        Ok(archive) => archive,
        Err(refused) if from.is_none() => elsewhere::read(&operator, &of, refused).await,
        Err(refused) => refused.into_response(),
    }
}

async fn archive_of(operator: &Operator, id: &str) -> Result<Response, ErrorResponse> {
    let layer: LayerId = id
        .parse()
        .map_err(|_| bad(format!("{id:?} is not the id of a layer")))?;
    let archive = operator.builds.export_layer(&layer).await;
    let archive = archive.map_err(|error| of_node(&error))?;
    Ok(Body::from_stream(ReaderStream::with_capacity(archive, 64 << 10)).into_response())
}

/// Makes a template of a file, which is the body. It is read to its end also when it is refused: clients read the
/// response once they have sent everything.
pub(super) async fn import(
    State(operator): State<Operator>,
    Query(wanted): Query<TemplateParameters>,
    body: Body,
) -> Result<Json<OperatorTemplate>, ErrorResponse> {
    let mut file = StreamReader::new(BodyDataStream::new(body.map_err(io::Error::other)));
    let imported = import_from(&operator, wanted, &mut file).await;
    if imported.is_err() {
        let _ = tokio::io::copy(&mut file, &mut tokio::io::sink()).await;
    }
    imported.map(Json)
}

async fn import_from(
    operator: &Operator,
    wanted: TemplateParameters,
    file: impl AsyncRead + Send + Unpin,
) -> Result<OperatorTemplate, ErrorResponse> {
    let to = Destination {
        team: team_of(operator, &wanted.team).await?,
        name: match wanted.name {
            Some(text) => Some(TemplateName::new(&text).map_err(|error| bad(error.to_string()))?),
            None => None,
        },
        any_base: wanted.any_base,
    };
    let imported = operator.builds.import(to, file).await?;
    Ok(OperatorTemplate {
        template_id: imported.template.as_str().to_owned(),
        build_id: imported.build.as_str().to_owned(),
        warning: imported.warning,
    })
}

/// Query parameters of a collection.
#[derive(Debug, Deserialize)]
pub(super) struct CollectionParameters {
    #[serde(default)]
    dry_run: bool,
    /// Whether results of steps and uploaded files are removed, too.
    #[serde(default)]
    cache: bool,
}

/// Removes layers that nothing uses, and what is kept for later builds if that is wanted, or only names the layers.
pub(super) async fn collect(
    State(operator): State<Operator>,
    Query(wanted): Query<CollectionParameters>,
) -> Result<Json<OperatorCollection>, ErrorResponse> {
    let (results, files) = if wanted.cache && !wanted.dry_run {
        operator.builds.forget_unused().await?
    } else {
        (0, 0)
    };
    let collected = operator.builds.collect_now(wanted.dry_run).await?;
    let collected = collected.map_err(|why| ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why))?;
    if !wanted.dry_run {
        let limited = operator.sandboxes.limit_memories().await;
        limited.map_err(|error| {
            let why = format!("cannot remove memory of snapshots from a node: {}", Chain(&error));
            ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, why)
        })?;
    }
    let layers = collected.into_iter().map(|layer| OperatorLayer {
        id: layer.id.as_str().to_owned(),
        bytes: layer.bytes,
    });
    Ok(Json(OperatorCollection {
        layers: layers.collect(),
        results,
        files,
        teams: space(&operator).await?,
    }))
}

async fn space(operator: &Operator) -> Result<Vec<OperatorSpace>, ErrorResponse> {
    let builds = &operator.builds;
    let sizes: HashMap<LayerId, u64> = {
        let layers = builds.layers().await.map_err(|error| of_node(&error))?;
        layers.into_iter().map(|layer| (layer.id, layer.bytes)).collect()
    };
    let mut teams: BTreeMap<TeamId, (BTreeSet<LayerId>, BTreeSet<LayerId>, u64)> = BTreeMap::new();
    for (team, layers) in builds.template_layers().await? {
        teams.entry(team).or_default().0.extend(layers);
    }
    for (team, layer) in builds.rows.layer_cache_by_team().await? {
        teams.entry(team).or_default().1.extend(layer.parse::<LayerId>().ok());
    }
    for (team, bytes) in builds.rows.template_file_totals().await? {
        teams.entry(team).or_default().2 = bytes;
    }
    let memory = builds.memory_bytes().await;
    let memory = memory.map_err(|error| ErrorResponse(StatusCode::SERVICE_UNAVAILABLE, Chain(&error).to_string()))?;
    let names = team_names(operator).await?;
    let size = |layers: &mut dyn Iterator<Item = &LayerId>| layers.filter_map(|layer| sizes.get(layer)).sum();
    let mut spaces: Vec<OperatorSpace> = teams
        .into_iter()
        .map(|(id, (templates, cache, file_bytes))| OperatorSpace {
            team: names.get(&id).cloned().unwrap_or_else(|| id.as_str().to_owned()),
            template_bytes: size(&mut templates.iter()) + memory.get(&id).copied().unwrap_or(0),
            cache_bytes: size(&mut cache.difference(&templates)),
            file_bytes,
        })
        .collect();
    spaces.sort_by(|a, b| a.team.cmp(&b.team));
    Ok(spaces)
}
