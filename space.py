"""Entry of a hosted Space: the platform wants `demo.launch`, our routes join it. Never name this file app.py."""

import signal

from app.logs import set_up
from app.main import create_context, entry_options, gates, open_store, prepare_gradio
from app.settings import Settings


def main() -> None:
    settings = Settings.from_env()
    set_up(settings.log_json)
    for ending in (signal.SIGTERM, signal.SIGINT):  # a platform ends us so, or ignores the second; runs are to be kept
        signal.signal(ending, signal.default_int_handler)
    prepare_gradio(settings)  # before Gradio is imported
    from app.api import include_routes
    from app.ui import build_ui

    context = create_context(settings)
    open_store(context)
    demo = build_ui(context)
    host, port = settings.host, settings.port
    app, _, _ = demo.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        app_kwargs={"middleware": gates(context), "openapi_url": None},
        **entry_options(context),
    )
    include_routes(app, context)
    try:
        demo.block_thread()
    finally:
        context.close()


if __name__ == "__main__":
    main()
