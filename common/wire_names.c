/* dl_wire, what people read: names of types, verdicts and refusals. */
#include "common/mem.h"
#include "common/wire.h"
#include "common/wire_table.h"

const char *dl_wire_type_name(enum dl_wire_type type)
{
    const struct dl_wire_format *format = dl_wire_format_of(type);
    return format == NULL ? "unknown" : format->name;
}

const char *dl_verdict_name(enum dl_verdict verdict)
{
    static const char *const names[DL_VERDICT_COUNT] = {
        [DL_VERDICT_ACCEPTED] = "accepted",
        [DL_VERDICT_LATE] = "late",
        [DL_VERDICT_DUPLICATE] = "duplicate",
        [DL_VERDICT_STALE_BASE] = "stale_base",
        [DL_VERDICT_NOT_FINITE] = "not_finite",
        [DL_VERDICT_NORM] = "norm",
        [DL_VERDICT_CHECKSUM] = "checksum",
        [DL_VERDICT_MALFORMED] = "malformed",
        [DL_VERDICT_UNKNOWN_ROUND] = "unknown_round",
        [DL_VERDICT_LAYOUT_MISMATCH] = "layout_mismatch",
        [DL_VERDICT_BELOW_QUORUM] = "below_quorum",
        [DL_VERDICT_ABORTED] = "aborted",
        [DL_VERDICT_NOTHING] = "nothing",
        [DL_VERDICT_LEASE_LOST] = "lease_lost",
    };
    return (unsigned)verdict < DL_VERDICT_COUNT ? names[verdict] : "unknown";
}

bool dl_refusal_is_temporary(enum dl_refusal code)
{
    return code == DL_REFUSE_FULL;
}
