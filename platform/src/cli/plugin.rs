//! `botix plugin`: what an upload would be told, and what a delivery would send.

use std::{path::PathBuf, sync::Arc};

use clap::Subcommand;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use super::CommandResult;
use crate::{
    contract::request_id::RequestId,
    db::Timestamp,
    plugins::{self, Limits, PluginEngine, inspect},
    webhooks::{endpoints::EndpointId, events::EventId, payload},
};

#[derive(Subcommand)]
pub(super) enum PluginCommand {
    /// Say what an upload would be told.
    Check {
        /// The component.
        file: PathBuf,
    },
    /// Show what a delivery of an event would send.
    Run {
        /// The component.
        file: PathBuf,
        /// A file with `{"type", "data"}`, as for `POST /events`.
        #[arg(long)]
        event: PathBuf,
        /// A file with the plugin's configuration.
        #[arg(long)]
        config: Option<PathBuf>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventFile {
    #[serde(rename = "type")]
    event_type: String,
    data: Box<RawValue>,
}

pub(super) async fn run(command: PluginCommand) -> CommandResult {
    let engine = PluginEngine::new(Limits::default(), 1)?;
    match command {
        PluginCommand::Check { file } => {
            let component = read(&file)?;
            let exports = inspect(&component)?;
            let artifact = engine.compile_isolated(&component).await?;
            engine.load(&artifact)?;
            println!(
                "{:#}",
                json!({"ok": true, "size": component.len(),
                "exports": {"transform": exports.transform, "sign": exports.sign}})
            );
        }
        PluginCommand::Run {
            file,
            event,
            config,
        } => {
            let event: EventFile = serde_json::from_slice(&read(&event)?)
                .map_err(|error| format!("{}: {error}", event.display()))?;
            let config = match config {
                Some(path) => {
                    let text = String::from_utf8(read(&path)?)?;
                    serde_json::from_str::<&RawValue>(&text)
                        .map_err(|error| format!("{}: {error}", path.display()))?;
                    text
                }
                None => "{}".to_owned(),
            };
            let component = read(&file)?;
            let plugin = engine.load(&engine.compile_isolated(&component).await?)?;
            let report = engine.run(&plugin, call(&event, config)).await;
            let failed = matches!(report.outcome, plugins::Outcome::Failed { .. });
            println!("{:#}", shown(report));
            if failed {
                return Err(
                    "the plugin failed; a delivery would be tried again by the ladder".into(),
                );
            }
        }
    }
    Ok(())
}

fn read(path: &PathBuf) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn call(event: &EventFile, config: String) -> plugins::Call {
    let now = Timestamp::now();
    let (id, timestamp) = (EventId::generate().to_string(), now.to_string());
    let body = payload::build(
        &payload::Event {
            id: &id,
            event_type: &event.event_type,
            timestamp: &timestamp,
            project_id: "prj_00000000000000000000000000",
            data: Some(event.data.get()),
        },
        "http://127.0.0.1:8080",
    )
    .body;
    plugins::Call {
        event: plugins::Event {
            id,
            event_type: event.event_type.clone(),
            timestamp,
            body,
        },
        delivery: plugins::Delivery {
            endpoint_id: EndpointId::generate().to_string(),
            url: "https://example.com/webhooks".to_owned(),
            attempt: 1,
            request_id: RequestId::generate().to_string(),
        },
        config: config.into(),
        // A fixed key, so that a signature made here can be checked by hand.
        keys: Arc::new([("endpoint", vec![0; 32])].into_iter().collect()),
        now_ms: u64::try_from(now.micros() / 1_000).unwrap_or(0),
    }
}

fn shown(report: plugins::Report) -> serde_json::Value {
    let mut shown =
        json!({"log": report.log, "duration_us": report.duration_us, "fuel": report.fuel});
    let more = match report.outcome {
        plugins::Outcome::Deliver { body, headers } => {
            let headers: Vec<_> = headers
                .iter()
                .map(|(name, value)| json!({"name": name, "value": value}))
                .collect();
            json!({"outcome": "deliver", "body": body, "headers": headers})
        }
        plugins::Outcome::Drop { reason } => json!({"outcome": "drop", "reason": reason}),
        plugins::Outcome::Failed { stage, error } => {
            json!({"outcome": "failed", "error": format!("{}: {error}", stage.as_str())})
        }
    };
    if let (Some(shown), serde_json::Value::Object(more)) = (shown.as_object_mut(), more) {
        shown.extend(more);
    }
    shown
}
