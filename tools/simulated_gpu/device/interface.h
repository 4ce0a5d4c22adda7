/* What tests may ask of the simulated device. They find these functions by name (support/simulated_device.hpp), since
   the device is a library that is loaded in front of them, or is not there. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How many operators and copies were queued so far, on all devices. */
int64_t simulated_device_launches(void);

/* How many of them on streams of high priority. */
int64_t simulated_device_high_priority_launches(void);

/* How often a host thread used a device so far: its streams, its memory, or what it tells of that. */
int64_t simulated_device_uses(int device);

/* How often a host thread waited so far for all that a device, or one of its streams, had to do. */
int64_t simulated_device_host_waits(void);

/* How often it waited for an event behind which the stream had more to do: the device does not stand still then. */
int64_t simulated_device_late_waits(void);

/* Takes the oldest report of a mistake; null if there is none. The text is valid until the calling thread's next call.
 */
const char* simulated_device_take_report(void);

/* Queues task(argument) on a stream, as c10 numbers it. Nothing is known of what the task reads and writes. */
void simulated_device_queue(int device, int64_t stream, void (*task)(void*), void* argument);

#ifdef __cplusplus
}
#endif
