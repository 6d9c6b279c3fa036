//! All nodes of this server as one [`NodeApi`], for what does not care on which of them something is: traffic, builds, layers,
//! and figures.
//!
//! A call about a sandbox goes to its node: that of its entry in the registry, or the one on which this has started it, for
//! a step of a build. A list is that of all nodes that are there; for that of all, see [`Nodes::layers`].

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::network::EgressPolicy;
use parking_lot::Mutex;
use protocol::node::{
    Adopted, ClaimSandbox, Committed, CommittedCopy, CopiedDisk, DialError, EgressConnections, EgressCounters,
    ForkSandbox, FrozenSandbox, HostReport, LayerInfo, LayerStream, MemoryInfo, NoCapacity, NodeApi, NodeDeadline,
    NodeError, NodeEvents, NodeFuture, PauseSandbox, PausedSandbox, PermitRequest, ResumeSandbox, ResumedSandbox,
    SandboxSample, SandboxStream, StartSandbox, StartedSandbox, Wanted,
};
use protocol::template_file::BaseVersion;
use tokio_util::sync::CancellationToken;

use super::{ANYWHERE, Needs, Nodes, ServedNode};
use crate::sandboxes::registry::Registry;

/// How long a node may take for figures, so that one that hangs does not hold up those of the others.
const FIGURES_BOUND: Duration = Duration::from_secs(5);

/// All nodes of a server.
pub(crate) struct AllNodes {
    nodes: Arc<Nodes>,
    registry: Arc<Registry>,
    /// Sandboxes that were started here: those of builds.
    started: Mutex<HashMap<SandboxId, Weak<ServedNode>>>,
    /// The nodes that lacked a layer when something was to be started there: they are about to get it.
    lacking: Mutex<HashMap<LayerId, Weak<ServedNode>>>,
}

impl fmt::Debug for AllNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllNodes")
    }
}

impl AllNodes {
    pub(crate) fn new(nodes: Arc<Nodes>, registry: Arc<Registry>) -> Self {
        Self {
            nodes,
            registry,
            started: Mutex::default(),
            lacking: Mutex::default(),
        }
    }

    /// The node of a sandbox.
    fn of(&self, id: &SandboxId) -> Result<Arc<ServedNode>, NodeError> {
        if let Some(entry) = self.registry.get(id) {
            return Ok(Arc::clone(&entry.node));
        }
        let mut started = self.started.lock();
        let node = started.get(id).and_then(in_session);
        if node.is_none() {
            // The next session of its node ends it.
            started.remove(id);
        }
        node.ok_or_else(|| NodeError::NotFound(id.clone()))
    }

    /// The nodes to try for a step of a build, the best first.
    fn candidates(&self, request: &StartSandbox) -> Vec<Arc<ServedNode>> {
        let before = self.started.lock().get(&request.id).and_then(in_session);
        match before {
            // It was told that a layer is missing, which is there now.
            Some(node) => vec![node],
            None => self.placed(request),
        }
    }

    /// The node that has a share of its host for a sandbox, and then others.
    fn placed(&self, request: &StartSandbox) -> Vec<Arc<ServedNode>> {
        let mut nodes = self.nodes.choose_for_step(Needs {
            image: &request.image,
            memory: None,
            memory_mb: request.resources.memory_mb,
            pool: None,
        });
        if let Some(admitted) = self.nodes.admitted_by(&request.id) {
            nodes.retain(|node| !Arc::ptr_eq(node, &admitted));
            nodes.insert(0, admitted);
        }
        nodes
    }

    async fn start_somewhere(&self, request: StartSandbox) -> Result<StartedSandbox, NodeError> {
        let mut failed = NodeError::Away;
        for node in self.candidates(&request) {
            self.started.lock().insert(request.id.clone(), Arc::downgrade(&node));
            match (*node.handle).start(request.clone()).await {
                Ok(started) => return Ok(started),
                Err(NodeError::NoLayer(layer)) if node.handle.stored().is_some() => {
                    self.lacking.lock().insert(layer.clone(), Arc::downgrade(&node));
                    return Err(NodeError::NoLayer(layer));
                }
                Err(error @ (NodeError::NoLayer(_) | NodeError::Away | NodeError::Capacity(_))) => {
                    self.started.lock().remove(&request.id);
                    failed = error;
                }
                Err(error) => {
                    // One that may run nevertheless is ended by whoever wanted it.
                    if !matches!(error, NodeError::Unreachable(_)) {
                        self.started.lock().remove(&request.id);
                    }
                    return Err(error);
                }
            }
        }
        Err(failed)
    }

    async fn kill_of(&self, id: &SandboxId) -> Result<(), NodeError> {
        let killed = self.of(id)?.handle.kill(id).await;
        if matches!(killed, Ok(()) | Err(NodeError::NotFound(_))) {
            self.started.lock().remove(id);
        }
        killed
    }

    async fn commit_of(&self, id: &SandboxId, merge: bool) -> Result<Committed, NodeError> {
        let node = self.of(id)?;
        let committed = node.handle.commit(id, merge).await;
        if !matches!(committed, Err(NodeError::Away | NodeError::Unreachable(_))) {
            self.started.lock().remove(id);
        }
        if let Ok(committed) = &committed {
            node.note_layer(&committed.layer);
        }
        committed
    }

    /// Tries nodes for what only some have: `error` says whether one lacks it.
    async fn export(&self, id: &LayerId) -> Result<LayerStream, NodeError> {
        let mut failed = NodeError::NoLayer(id.clone());
        let mut nodes = self.nodes.all();
        nodes.sort_by_key(|node| !node.holdings.lock().layers.contains(id));
        for node in nodes {
            match node.handle.export_layer(id).await {
                Err(NodeError::NoLayer(_)) => {}
                Err(NodeError::Away) => failed = NodeError::Away,
                exported => return exported,
            }
        }
        Err(failed)
    }

    async fn import(&self, id: &LayerId, bytes: u64, archive: LayerStream) -> Result<Committed, NodeError> {
        let lacking = self.lacking.lock().remove(id);
        let lacking = lacking.as_ref().and_then(in_session);
        let best = || self.nodes.choose_for_step(ANYWHERE).into_iter().next();
        let node = lacking.or_else(best).ok_or(NodeError::Away)?;
        let imported = node.handle.import_layer(id, bytes, archive).await;
        if imported.is_ok() {
            node.note_layer(id);
        }
        imported
    }

    /// The figures of those nodes that give any.
    async fn figures<T>(&self, ask: impl Fn(Arc<ServedNode>) -> NodeFuture<'static, Result<T, NodeError>>) -> Vec<T> {
        let asked: Vec<_> = self.nodes.all().into_iter().map(ask).collect();
        let bounded = asked
            .into_iter()
            .map(|answer| tokio::time::timeout(FIGURES_BOUND, answer));
        let answered = join_all(bounded).await;
        answered.into_iter().filter_map(|answer| answer.ok()?.ok()).collect()
    }

    async fn samples_of_all(&self) -> Vec<SandboxSample> {
        let samples = self.figures(|node| {
            Box::pin(async move {
                let samples = node.handle.samples().await?;
                Ok((node, samples))
            })
        });
        let mut all = Vec::new();
        for (node, samples) in samples.await {
            // A node speaks of its own sandboxes alone.
            all.extend(samples.into_iter().filter(|sample| {
                let entry = self.registry.get(&sample.id);
                entry.is_some_and(|entry| Arc::ptr_eq(&entry.node, &node))
            }));
        }
        all
    }
}

impl NodeApi for AllNodes {
    /// Whoever places a sandbox has chosen a node, and asks that.
    fn permit(&self, request: PermitRequest) -> NodeFuture<'_, Result<Result<(), NoCapacity>, NodeError>> {
        Box::pin(async move { Err(of_one_node(&format!("the permit of {}", request.id))) })
    }

    fn give_back(&self, id: &SandboxId, number: u64) {
        if let Ok(node) = self.of(id) {
            node.handle.give_back(id, number);
        }
    }

    fn start(&self, request: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(self.start_somewhere(request))
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(self.kill_of(id))
    }

    fn freeze<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<FrozenSandbox, NodeError>> {
        Box::pin(async move { self.of(id)?.handle.freeze(id).await })
    }

    fn claim(&self, request: ClaimSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(async move { self.of(&request.id)?.handle.claim(request).await })
    }

    fn pause(
        &self,
        request: PauseSandbox,
        cancel: CancellationToken,
    ) -> NodeFuture<'_, Result<PausedSandbox, NodeError>> {
        Box::pin(async move { self.of(&request.id)?.handle.pause(request, cancel).await })
    }

    fn resume(&self, request: ResumeSandbox) -> NodeFuture<'_, Result<ResumedSandbox, NodeError>> {
        Box::pin(async move { self.of(&request.id)?.handle.resume(request).await })
    }

    fn commit<'a>(&'a self, id: &'a SandboxId, merge: bool) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(self.commit_of(id, merge))
    }

    fn fork(&self, request: ForkSandbox) -> NodeFuture<'_, Result<Vec<Result<StartedSandbox, NodeError>>, NodeError>> {
        Box::pin(async move { self.of(&request.id)?.handle.fork(request).await })
    }

    fn copy_disk<'a>(&'a self, id: &'a SandboxId, memory: bool) -> NodeFuture<'a, Result<CopiedDisk, NodeError>> {
        Box::pin(async move { self.of(id)?.handle.copy_disk(id, memory).await })
    }

    /// Only the node of a copy knows it, so whoever has made one asks that.
    fn commit_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        _merge: bool,
        _memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<CommittedCopy, NodeError>> {
        Box::pin(async move { Err(of_one_node(&format!("the copy {disk}"))) })
    }

    fn keep_copy<'a>(
        &'a self,
        disk: &'a DiskId,
        _memory: Option<&'a BuildId>,
    ) -> NodeFuture<'a, Result<Option<u64>, NodeError>> {
        Box::pin(async move { Err(of_one_node(&format!("the copy {disk}"))) })
    }

    fn memories(&self) -> NodeFuture<'_, Result<Vec<MemoryInfo>, NodeError>> {
        Box::pin(async move {
            let mut all = Vec::new();
            for node in self.nodes.all() {
                all.extend(if_there(node.handle.memories().await)?.unwrap_or_default());
            }
            Ok(all)
        })
    }

    fn remove_memory<'a>(&'a self, build: &'a BuildId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            for node in self.nodes.all() {
                if_there(node.handle.remove_memory(build).await)?;
                node.holdings.lock().memories.remove(build);
            }
            Ok(())
        })
    }

    fn layers(&self) -> NodeFuture<'_, Result<Vec<LayerInfo>, NodeError>> {
        Box::pin(async move {
            let mut all = BTreeMap::new();
            for node in self.nodes.all() {
                let layers = if_there(node.handle.layers().await)?.unwrap_or_default();
                all.extend(layers.into_iter().map(|layer| (layer.id.clone(), layer)));
            }
            Ok(all.into_values().collect())
        })
    }

    fn remove_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move {
            for node in self.nodes.all() {
                if_there(node.handle.remove_layer(id).await)?;
                node.holdings.lock().layers.remove(id);
            }
            Ok(())
        })
    }

    fn export_layer<'a>(&'a self, id: &'a LayerId) -> NodeFuture<'a, Result<LayerStream, NodeError>> {
        Box::pin(self.export(id))
    }

    fn import_layer<'a>(
        &'a self,
        id: &'a LayerId,
        bytes: u64,
        archive: LayerStream,
    ) -> NodeFuture<'a, Result<Committed, NodeError>> {
        Box::pin(self.import(id, bytes, archive))
    }

    fn base_version(&self) -> NodeFuture<'_, Result<BaseVersion, NodeError>> {
        Box::pin(async move {
            let node = self.nodes.choose_for_step(ANYWHERE).into_iter().next();
            node.ok_or(NodeError::Away)?.handle.base_version().await
        })
    }

    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async move {
            let node = self.of(id).map_err(|_| DialError::Gone)?;
            node.handle.dial(id, port).await
        })
    }

    fn set_egress<'a>(&'a self, id: &'a SandboxId, policy: EgressPolicy) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move { self.of(id)?.handle.set_egress(id, policy).await })
    }

    fn set_deadline<'a>(&'a self, id: &'a SandboxId, deadline: NodeDeadline) -> NodeFuture<'a, Result<(), NodeError>> {
        Box::pin(async move { self.of(id)?.handle.set_deadline(id, deadline).await })
    }

    fn reconcile(&self, _wanted: Vec<Wanted>) -> NodeFuture<'_, Result<Vec<Adopted>, NodeError>> {
        Box::pin(async { Err(of_one_node("a takeover")) })
    }

    fn subscribe(&self) -> NodeFuture<'_, Result<NodeEvents, NodeError>> {
        Box::pin(async { Err(of_one_node("a subscription")) })
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(async move { Ok(self.samples_of_all().await) })
    }

    /// Capacity of the node that has the most memory left.
    fn capacity(&self) -> NodeFuture<'_, Result<HostReport, NodeError>> {
        Box::pin(async move {
            let all = self.figures(|node| Box::pin(async move { node.handle.capacity().await }));
            let all = all.await;
            let best = all.into_iter().max_by_key(|report| report.left.memory_available_bytes);
            best.ok_or(NodeError::Away)
        })
    }

    fn egress_counters(&self) -> NodeFuture<'_, Result<EgressCounters, NodeError>> {
        Box::pin(async move {
            let all = self.figures(|node| Box::pin(async move { node.handle.egress_counters().await }));
            let all = all.await;
            all.into_iter().reduce(sum).ok_or(NodeError::Away)
        })
    }
}

/// A node, unless its session is over.
fn in_session(node: &Weak<ServedNode>) -> Option<Arc<ServedNode>> {
    node.upgrade().filter(|node| !node.over.is_cancelled())
}

/// The answer of a node; none while it is away.
fn if_there<T>(answer: Result<T, NodeError>) -> Result<Option<T>, NodeError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(NodeError::Away | NodeError::Unreachable(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn of_one_node(what: &str) -> NodeError {
    NodeError::Unsupported(format!("{what} is that of one node"))
}

fn sum(a: EgressCounters, b: EgressCounters) -> EgressCounters {
    let connections = |a: EgressConnections, b: EgressConnections| EgressConnections {
        open: a.open.saturating_add(b.open),
        ended: a.ended.saturating_add(b.ended),
        denied: a.denied.saturating_add(b.denied),
        failed: a.failed.saturating_add(b.failed),
    };
    let mut total = a;
    total.tcp = connections(a.tcp, b.tcp);
    total.udp = connections(a.udp, b.udp);
    for (total, more) in [
        (&mut total.bytes_sent, b.bytes_sent),
        (&mut total.bytes_received, b.bytes_received),
        (&mut total.unlogged, b.unlogged),
        (&mut total.intercepted, b.intercepted),
        (&mut total.injected, b.injected),
        (&mut total.requests_refused, b.requests_refused),
        (&mut total.requests_limited, b.requests_limited),
        (&mut total.dns.queries, b.dns.queries),
        (&mut total.dns.cache_hits, b.dns.cache_hits),
        (&mut total.dns.refused, b.dns.refused),
        (&mut total.dns.limited, b.dns.limited),
        (&mut total.dns.unanswered, b.dns.unanswered),
        (&mut total.dns.forwarded, b.dns.forwarded),
        (&mut total.dns.failed, b.dns.failed),
    ] {
        // A node may report anything.
        *total = total.saturating_add(more);
    }
    total
}
