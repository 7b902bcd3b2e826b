"""Names of all metrics, one constant per line, as Prometheus shows them. A room adds its names here and nowhere else.

``_total`` names are counters (they only grow), the others are gauges (of now). Units are in the name where there is one.
"""

# policy/sched: counters. A sample of an n > 1 request is a session of its own.
SESSIONS_SUBMITTED = "kilat_sessions_submitted_total"
FINISHED_STOP = "kilat_sessions_finished_stop_total"
FINISHED_LENGTH = "kilat_sessions_finished_length_total"
FINISHED_ABORT = "kilat_sessions_finished_abort_total"
FINISHED_ERROR = "kilat_sessions_finished_error_total"
SESSIONS_DEPARTED = "kilat_sessions_departed_total"
ARRIVED_TOKENS = "kilat_arrived_tokens_total"
PROMPT_TOKENS = "kilat_prompt_tokens_total"
OUTPUT_TOKENS = "kilat_output_tokens_total"
PREFILL_TOKENS = "kilat_prefill_tokens_total"
PREFIX_QUERIED_TOKENS = "kilat_prefix_queried_tokens_total"
PREFIX_HIT_TOKENS = "kilat_prefix_hit_tokens_total"
PREEMPTIONS = "kilat_preemptions_total"
WASTED_TOKENS = "kilat_wasted_tokens_total"

# policy/sched: gauges
SESSIONS_RUNNING = "kilat_sessions_running"
SESSIONS_WAITING = "kilat_sessions_waiting"
PAGES_FREE = "kilat_pages_free"
PAGES_USED = "kilat_pages_used"
PAGES_CACHED = "kilat_pages_cached"
PAGES_PINNED = "kilat_pages_pinned"

# engine: counters (the difference of run and model seconds is the host's share of a step)
STEP_SECONDS = "kilat_step_seconds_total"
RUN_SECONDS = "kilat_run_seconds_total"
MODEL_SECONDS = "kilat_model_seconds_total"

# engine: gauges
SESSIONS_COMPILING = "kilat_sessions_compiling"

# cluster/worker: sent with each Status
STEPS = "kilat_steps_total"
STEP_AGE = "kilat_step_age_seconds"
PAGES_OFFERED = "kilat_pages_offered"
PAGES_MOVING = "kilat_pages_moving"
PAGES_QUARANTINED = "kilat_pages_quarantined"

# kv: of each tier of the prefix cache (pages given back, bytes, pages that had to leave, pages that were not what had been written)
TIER_HOST_HITS = "kilat_tier_host_hits_total"
TIER_HOST_READ_BYTES = "kilat_tier_host_read_bytes_total"
TIER_HOST_WRITTEN_BYTES = "kilat_tier_host_written_bytes_total"
TIER_HOST_EVICTIONS = "kilat_tier_host_evictions_total"
TIER_DISK_HITS = "kilat_tier_disk_hits_total"
TIER_DISK_READ_BYTES = "kilat_tier_disk_read_bytes_total"
TIER_DISK_WRITTEN_BYTES = "kilat_tier_disk_written_bytes_total"
TIER_DISK_EVICTIONS = "kilat_tier_disk_evictions_total"
TIER_DISK_DAMAGED = "kilat_tier_disk_damaged_total"
TIER_PAGES_FORGOTTEN = "kilat_tier_pages_forgotten_total"

# cluster/gateway: of HTTP requests
REQUESTS = "kilat_requests_total"
REQUESTS_OPEN = "kilat_requests_open"
TTFT = "kilat_time_to_first_token_seconds"
TPOT = "kilat_time_per_output_token_seconds"
REQUEST_SECONDS = "kilat_request_seconds"

# cluster/gateway: of its workers and the sessions that they have
SESSIONS_OPEN = "kilat_sessions_open"
STALE_EVENTS = "kilat_stale_events_total"
BAD_FRAMES = "kilat_bad_frames_total"
SLOW_READERS = "kilat_slow_readers_total"
WORKER_UP = "kilat_worker_up"
SESSION_RETRIES = "kilat_session_retries_total"
SESSIONS_POISONED = "kilat_sessions_poisoned_total"
HAND_OVERS = "kilat_hand_overs_total"
PLANNED_MOVES = "kilat_planned_moves_total"
LENDS = "kilat_prefix_lends_total"
MOVES_OPEN = "kilat_moves_open"
MOVES_DONE = "kilat_moves_done_total"
MOVES_FAILED = "kilat_moves_failed_total"
MOVED_BYTES = "kilat_moved_bytes_total"
WORKER_PREFILL_WEIGHT = "kilat_worker_prefill_weight"
WORKER_DECODE_WEIGHT = "kilat_worker_decode_weight"
WORKER_RESTARTS = "kilat_worker_restarts_total"
WORKERS_WISHED = "kilat_workers_wished"
GATEWAY_TASKS = "kilat_gateway_tasks"
