//! Finished templates as artifacts of registries: what a file of a template consists of, as blobs.
//!
//! The configuration of an artifact is the manifest of the file, and its layers are those of the file, in the same order.
//! So registries and programs that copy between them need to know nothing of templates. What comes from a registry is
//! checked against its digests here, and like every file by the platform.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use formats::percent;
use formats::tar::{BLOCK, padding};
use http::Method;
use http_body_util::{BodyExt as _, Empty};
use protocol::template_file::{FORMAT, MANIFEST, MANIFEST_MAX, Manifest, header, layer_name};
use registry::Failure;
use registry::name::is_digest;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::pieces::Pieces;
use super::reference::Reference;
use super::repository::{Artifacts, Upload};
use crate::data_dir::DataDir;
use crate::operator::{ask, exchange};
use crate::output;
use crate::output::mib;

const IMAGE_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// What tells our artifacts from images and from those of other programs.
const ARTIFACT: &str = "application/vnd.ringfence.template.v1";
const CONFIG: &str = "application/vnd.ringfence.template.config.v1+json";
const LAYER: &str = "application/vnd.ringfence.template.layer.v1.tar+zstd";
/// The name that programs give to the file of a blob.
const TITLE: &str = "org.opencontainers.image.title";
/// How often a blob that ended early is asked for again.
const ATTEMPTS: u32 = 5;

/// The manifest of an artifact.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Artifact {
    schema_version: u32,
    media_type: String,
    artifact_type: Option<String>,
    config: Blob,
    layers: Vec<Blob>,
}

/// A blob of an artifact.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Blob {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<Value>,
}

fn digest_of(hash: &Sha256) -> String {
    format!("sha256:{}", hex::encode(hash.clone().finalize()))
}

/// A file without a name. Its size and its digest must be known before a registry takes it.
fn nameless(dir: &DataDir) -> Result<File> {
    let path = dir.path().join(format!(".push-{}", uuid::Uuid::new_v4()));
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("create {}", path.display()))?;
    fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    Ok(file)
}

/// Pushes a template.
pub(super) async fn push(dir: &DataDir, team: &str, name: &str, to: &Reference, registry: &Artifacts) -> Result<()> {
    let Some(tag) = to.tag.as_deref().filter(|_| to.digest.is_none()) else {
        bail!("{to}: a template is pushed under a tag, and its digest is what comes of it");
    };
    let query = format!(
        "/template?team={}&name={}",
        percent::encode(team),
        percent::encode(name)
    );
    let manifest: Manifest<Value> = ask(dir, Method::GET, &query).await?;
    ensure!(
        !manifest.layers.is_empty(),
        "template {name} has no layers of its own: there is nothing to push"
    );
    let (mut layers, mut sent, mut total) = (Vec::new(), 0, 0);
    for layer in &manifest.layers {
        let mut file = nameless(dir)?;
        let (mut hash, mut size) = (Sha256::new(), 0);
        let take = async |mut body: hyper::body::Incoming| {
            while let Some(frame) = body.frame().await {
                let frame = frame.context("the platform cut the layer: its log has the reason")?;
                if let Ok(data) = frame.into_data() {
                    file.write_all(&data).context("write the layer to the data directory")?;
                    hash.update(&data);
                    size += data.len() as u64;
                }
            }
            Ok(())
        };
        let query = format!("/layers/{}", layer.id);
        let taken = exchange(dir, Method::GET, &query, Empty::<Bytes>::new(), take).await;
        taken.with_context(|| format!("layer {}", layer.id))?;
        let digest = digest_of(&hash);
        let uploaded = registry.upload(&digest, &Upload { file, size }).await;
        sent += u32::from(uploaded.with_context(|| format!("push layer {}", layer.id))?);
        total += size;
        layers.push(Blob {
            media_type: LAYER.to_owned(),
            digest,
            size,
            annotations: Some(serde_json::json!({TITLE: layer_name(&layer.id)})),
        });
    }
    let config = Bytes::from(serde_json::to_vec(&manifest)?);
    let digest = digest_of(&Sha256::new_with_prefix(&config));
    let size = config.len() as u64;
    let uploaded = registry.upload(&digest, &config).await;
    uploaded.context("push the configuration")?;
    let artifact = Artifact {
        schema_version: 2,
        media_type: IMAGE_MANIFEST.to_owned(),
        artifact_type: Some(ARTIFACT.to_owned()),
        config: Blob {
            media_type: CONFIG.to_owned(),
            digest,
            size,
            annotations: None,
        },
        layers,
    };
    let text = Bytes::from(serde_json::to_vec(&artifact)?);
    let digest = digest_of(&Sha256::new_with_prefix(&text));
    let stored = registry.put_manifest(tag, IMAGE_MANIFEST, text).await;
    stored.with_context(|| format!("push {to}"))?;
    output::line(&format!(
        "pushed {to}@{digest} with {} layers, {}, of which {sent} layers were new to the registry",
        artifact.layers.len(),
        mib(total)
    ))
}

/// An artifact that was found, with the manifest of its template.
pub(super) struct Found {
    manifest: Manifest<Value>,
    text: Bytes,
    layers: Vec<Blob>,
}

/// Reads what an artifact consists of.
pub(super) async fn find(from: &Reference, registry: &Artifacts) -> Result<Found> {
    let most = usize::try_from(MANIFEST_MAX)?;
    let text = registry.manifest(from.target(), IMAGE_MANIFEST, most).await?;
    let digest = digest_of(&Sha256::new_with_prefix(&text));
    ensure!(
        from.digest.as_ref().is_none_or(|wanted| *wanted == digest),
        "the registry sent a manifest with the digest {digest}"
    );
    let Artifact { config, layers, .. } = parse(&text)?;
    let mut received = Vec::new();
    let keep = async |piece: Bytes| {
        received.extend_from_slice(&piece);
        Ok(true)
    };
    copy(registry, &config, keep).await.context("the configuration")?;
    let (manifest, layers) = check(&received, layers)?;
    Ok(Found {
        manifest,
        text: received.into(),
        layers,
    })
}

fn parse(text: &[u8]) -> Result<Artifact> {
    let artifact: Artifact = serde_json::from_slice(text).map_err(|_| anyhow!("it is no artifact of a template"))?;
    let kind = artifact.artifact_type.as_deref().unwrap_or_default();
    ensure!(
        kind == ARTIFACT && artifact.config.media_type == CONFIG,
        "it is no template, but an artifact of type {:?} with a configuration of type {:?}: templates from images are made \
         with `ringfence template build --from-image`",
        output::printable(kind),
        output::printable(&artifact.config.media_type),
    );
    ensure!(
        artifact.config.size <= MANIFEST_MAX,
        "the configuration is larger than {MANIFEST_MAX} bytes"
    );
    let has_digests =
        is_digest(&artifact.config.digest) && artifact.layers.iter().all(|layer| is_digest(&layer.digest));
    ensure!(has_digests, "it has an invalid digest");
    Ok(artifact)
}

/// Checks that the layers of an artifact are those of its template.
fn check(text: &[u8], layers: Vec<Blob>) -> Result<(Manifest<Value>, Vec<Blob>)> {
    let manifest: Manifest<Value> =
        serde_json::from_slice(text).context("the configuration is not that of a template")?;
    ensure!(
        manifest.format == FORMAT,
        "it has format {}, and this version reads format {FORMAT}",
        manifest.format
    );
    let is_same = layers.len() == manifest.layers.len()
        && layers.iter().zip(&manifest.layers).all(|(blob, layer)| {
            let title = blob.annotations.as_ref().and_then(|all| all.get(TITLE)?.as_str());
            blob.media_type == LAYER && title.is_none_or(|title| title == layer_name(&layer.id))
        });
    ensure!(is_same, "its layers are not those of its configuration");
    Ok((manifest, layers))
}

/// Sends an artifact as the file of a template. It ends early when the platform takes no more.
pub(super) async fn send(found: Found, registry: &Artifacts, to: &Pieces) -> Result<()> {
    let pad = |size| Bytes::from_static(&[0; BLOCK]).slice(..padding(size));
    let size = found.text.len() as u64;
    let head = Bytes::copy_from_slice(&header(MANIFEST, size));
    for piece in [head, found.text, pad(size)] {
        if !to.give(piece).await {
            return Ok(());
        }
    }
    for (blob, layer) in found.layers.iter().zip(&found.manifest.layers) {
        let head = Bytes::copy_from_slice(&header(&layer_name(&layer.id), blob.size));
        if !to.give(head).await {
            return Ok(());
        }
        let give = async |piece: Bytes| Ok(to.give(piece).await);
        let copied = copy(registry, blob, give).await;
        if !copied.with_context(|| format!("layer {}", layer.id))? || !to.give(pad(blob.size)).await {
            return Ok(());
        }
    }
    to.give(Bytes::from_static(&[0; 2 * BLOCK])).await;
    Ok(())
}

/// Reads a blob, and goes on where it ended early. The last piece is given when the digest is known to be right. Whether
/// all pieces were wanted.
async fn copy(registry: &Artifacts, blob: &Blob, mut give: impl AsyncFnMut(Bytes) -> Result<bool>) -> Result<bool> {
    let (mut hash, mut received, mut failed) = (Sha256::new(), 0_u64, 0);
    let mut last: Option<Bytes> = None;
    while received < blob.size {
        let before = received;
        let part = async {
            let (mut answer, is_rest) = registry.blob(&blob.digest, received).await?;
            // What was given before is left out of an answer from the beginning.
            let mut skip = if is_rest { 0 } else { received };
            while let Some(mut piece) = answer.chunk().await? {
                let known = usize::try_from(skip).unwrap_or(usize::MAX).min(piece.len());
                skip -= known as u64;
                let _ = piece.split_to(known);
                if piece.is_empty() {
                    continue;
                }
                received += piece.len() as u64;
                if received > blob.size {
                    return Ok(true);
                }
                hash.update(&piece);
                if let Some(last) = last.replace(piece)
                    && !give(last).await?
                {
                    return Ok(false);
                }
            }
            Ok::<bool, Failure>(true)
        };
        match part.await {
            Ok(false) => return Ok(false),
            Ok(true) => {}
            Err(failure) if failed + 1 >= ATTEMPTS || !failure.is_temporary => return Err(failure.error),
            Err(_) => {}
        }
        ensure!(
            received <= blob.size,
            "it is larger than the {} bytes of its manifest",
            blob.size
        );
        if received < blob.size {
            failed = if received > before { 1 } else { failed + 1 };
            ensure!(failed < ATTEMPTS, "it ended after {received} of {} bytes", blob.size);
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
    }
    let digest = digest_of(&hash);
    ensure!(digest == blob.digest, "the registry sent what has the digest {digest}");
    match last {
        Some(last) => give(last).await,
        None => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use model::id::LayerId;
    use serde_json::json;

    use super::*;

    fn artifact() -> Value {
        let id = LayerId::from_hash(&[7; 32]);
        let digest = format!("sha256:{}", "a1".repeat(32));
        json!({
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": ARTIFACT,
            "config": {"mediaType": CONFIG, "digest": digest, "size": 2},
            "layers": [{"mediaType": LAYER, "digest": digest, "size": 5, "annotations": {TITLE: layer_name(&id)}}],
            "annotations": {"of": "another program"},
        })
    }

    fn template() -> Value {
        json!({
            "format": FORMAT, "name": "n", "cpu_count": 1, "memory_mb": 512, "disk_mb": 1024, "config": {},
            "base": null, "layers": [{"id": LayerId::from_hash(&[7; 32]), "bytes": 9}],
        })
    }

    #[test]
    fn artifacts_are_those_of_templates() {
        let parsed = parse(artifact().to_string().as_bytes()).unwrap();
        check(template().to_string().as_bytes(), parsed.layers).unwrap();
        for (at, value, want) in [
            ("/artifactType", json!("application/x"), "no template"),
            ("/artifactType", Value::Null, "no template"),
            (
                "/config/mediaType",
                json!("application/vnd.oci.image.config.v1+json"),
                "--from-image",
            ),
            ("/config/size", json!(MANIFEST_MAX + 1), "larger"),
            ("/config/digest", json!("sha256:../../x"), "digest"),
            ("/layers/0/digest", json!("md5:1"), "digest"),
            ("/layers/0/size", json!(-1), "no artifact"),
            ("/layers", json!({}), "no artifact"),
        ] {
            let mut bad = artifact();
            *bad.pointer_mut(at).unwrap() = value;
            let error = parse(bad.to_string().as_bytes()).unwrap_err().to_string();
            assert!(error.contains(want), "{at}: {error}");
        }
    }

    #[test]
    fn layers_are_those_of_the_configuration() {
        let layers = || parse(artifact().to_string().as_bytes()).unwrap().layers;
        let refused =
            |template: &Value, layers| check(template.to_string().as_bytes(), layers).unwrap_err().to_string();
        let mut newer = template();
        newer["format"] = json!(FORMAT + 1);
        assert!(refused(&newer, layers()).contains("format"));
        assert!(refused(&template(), Vec::new()).contains("layers"));
        let mut other = template();
        other["layers"][0]["id"] = json!(LayerId::from_hash(&[8; 32]));
        assert!(refused(&other, layers()).contains("layers"));
        let mut kind = layers();
        kind[0].media_type = "application/vnd.oci.image.layer.v1.tar+gzip".to_owned();
        assert!(refused(&template(), kind).contains("layers"));
        // Programs that copy may drop annotations.
        let mut untitled = layers();
        untitled[0].annotations = None;
        assert!(check(template().to_string().as_bytes(), untitled).is_ok());
        assert!(refused(&json!({}), layers()).contains("not that of a template"));
    }
}
