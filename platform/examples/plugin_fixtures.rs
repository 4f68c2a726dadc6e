//! Writes the test plugins as `.wasm` files: `cargo run --example plugin_fixtures -- FOLDER`.

#[path = "../../tests/fixtures/plugins.rs"]
mod plugins;

fn main() -> std::io::Result<()> {
    let folder = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "target/plugin-fixtures".to_owned());
    std::fs::create_dir_all(&folder)?;
    for (name, wasm) in plugins::all() {
        let path = std::path::Path::new(&folder).join(format!("{name}.wasm"));
        std::fs::write(&path, &wasm)?;
        println!("{:>6} bytes  {}", wasm.len(), path.display());
    }
    Ok(())
}
