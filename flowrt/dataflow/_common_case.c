/* The commonest case of a runner in C: a message that alone completes a firing, and a short firing whose outputs have credits.
 *
 * The interpreted modules make every decision. They describe an edge or a node by a plan once (common_case.py),
 * and this file carries out the plan. A message or firing without a plan, or one that any check here does not expect, goes to the
 * interpreted method, and nothing has changed before. So every check here is a guard: the worst that a wrong one could do is to be slow.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define FOR_NAMES(X)                                                                                                                  \
    X(_failure) X(_wake) X(_end_failed) X(_finish) X(_emit) X(_emit_current) X(_end_fenced) X(_on_send_error) X(plan_arrival)             \
    X(plan_firing) X(resume) X(is_active) X(received) X(consumed) X(free) X(closed) X(pending) X(wake_at) X(popleft) X(append)         \
    X(num_calls) X(num_firings) X(compute_seconds) X(inline_seconds) X(numel) X(itemsize) X(__enter__) X(__exit__)   \
    X(consume) X(half) X(size) X(add_call)
#define DECLARE(name) static PyObject *S_##name;
FOR_NAMES(DECLARE)

#define MAX_PLANS 4096

/* What the constructor takes, in this order. */
#define FOR_PARTS(X)                                                                                                                  \
    X(runner) X(plans) X(inbound) X(inbound_edges) X(outbound) X(subgraph) X(ready) X(fences) X(statistics) X(nodes) X(functions) X(is_short) X(run_inline) X(now) X(post)     \
    X(Firing) X(Message) X(Payload) X(Tag) X(RoutedOutput) X(deque) X(inference_mode) X(in_mode) X(slow_accept) X(slow_settle) X(send_early)
enum {
#define NUMBER(name) P_##name,
    FOR_PARTS(NUMBER) NUM_PARTS
};

/* Offsets of the fields of msgspec structs, which lie in the object as members with slots do. */
enum { M_kind, M_tag, M_edge, M_header, M_tensors, M_lent, T_source, T_epoch, T_micro_batch, T_step, T_layer, F_node, F_tag, F_inputs, F_via,
       Y_tensors, Y_header, NUM_FIELDS };
static const struct { int part; const char *name; } FIELDS[NUM_FIELDS] = {
    {P_Message, "kind"}, {P_Message, "tag"}, {P_Message, "edge"}, {P_Message, "header"}, {P_Message, "tensors"}, {P_Message, "lent"},
    {P_Tag, "source"}, {P_Tag, "epoch"}, {P_Tag, "micro_batch"}, {P_Tag, "step"}, {P_Tag, "layer"},
    {P_Firing, "node"}, {P_Firing, "tag"}, {P_Firing, "inputs"}, {P_Firing, "via"},
    {P_Payload, "tensors"}, {P_Payload, "header"},
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *of[NUM_PARTS];
    PyObject *arrivals, *firings; /* plans, or None, by (edge, layer) and by (node, layer) */
    PyObject *firing, *routes, *outputs; /* of the call in progress */
    Py_ssize_t at[NUM_FIELDS];
    long max_inline;
} CommonCase;

#define FIELD(self, object, field) (*(PyObject **)((char *)(object) + (self)->at[field]))

static PyObject *data_kind; /* "data" */

static int is_text(PyObject *one, PyObject *other)
{
    return one == other || (PyUnicode_CheckExact(one) && PyUnicode_Compare(one, other) == 0);
}

/* A small number that is not negative, or -1 without an error. */
static long small(PyObject *number)
{
    if (!number || !PyLong_CheckExact(number))
        return -1;
    int overflow;
    long value = PyLong_AsLongAndOverflow(number, &overflow);
    return overflow || value < 0 ? -1 : value;
}

static long attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    long found = small(value);
    Py_XDECREF(value);
    PyErr_Clear();
    return found;
}

static int set_number(PyObject *object, PyObject *name, long value)
{
    PyObject *number = PyLong_FromLong(value);
    int failed = !number || PyObject_SetAttr(object, name, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static int add_to(PyObject *object, PyObject *name, PyObject *what)
{
    PyObject *value = PyObject_GetAttr(object, name), *sum = value ? PyNumber_Add(value, what) : NULL;
    int failed = !sum || PyObject_SetAttr(object, name, sum) < 0;
    Py_XDECREF(value);
    Py_XDECREF(sum);
    return failed ? -1 : 0;
}

static int is_false(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value == Py_False;
    Py_XDECREF(value);
    PyErr_Clear();
    return found;
}

/* The plan of (key, layer): borrowed; NULL without an error when there is none. Asked for once, of `make(key, layer)`. */
static PyObject *plan_of(CommonCase *self, PyObject *plans, PyObject *make, PyObject *key, PyObject *layer)
{
    PyObject *pair = PyTuple_Pack(2, key, layer);
    if (!pair)
        return NULL;
    PyObject *plan = PyDict_GetItemWithError(plans, pair);
    if (!plan && !PyErr_Occurred()) {
        if (PyDict_GET_SIZE(plans) >= MAX_PLANS) /* a peer may send any layer */
            PyDict_Clear(plans);
        PyObject *made = PyObject_CallMethodObjArgs(self->of[P_plans], make, key, layer, NULL);
        if (made && PyDict_SetItem(plans, pair, made) == 0)
            plan = PyDict_GetItemWithError(plans, pair);
        Py_XDECREF(made);
    }
    Py_DECREF(pair);
    return plan && PyTuple_CheckExact(plan) ? plan : NULL;
}

/* --- a message that arrives --- */

enum { A_inbound, A_peer, A_size, A_target, A_port, A_via, A_read, A_sources, A_micro_batches, A_fitting, NUM_ARRIVAL };

/* Whether the schema of the edge has let pass a message like this one before. */
static int fits(CommonCase *self, PyObject *plan, PyObject *tag, PyObject *tensors)
{
    PyObject *sources = PyTuple_GET_ITEM(plan, A_sources);
    if (sources == Py_None)
        return 1;
    long micro_batch = small(FIELD(self, tag, T_micro_batch));
    if (micro_batch < 0 || micro_batch >= small(PyTuple_GET_ITEM(plan, A_micro_batches)) || small(FIELD(self, tag, T_epoch)) < 0 ||
        small(FIELD(self, tag, T_step)) < 0 || PySet_Contains(sources, FIELD(self, tag, T_source)) != 1)
        return 0;
    PyObject *specs = PyTuple_New(PyTuple_GET_SIZE(tensors));
    for (Py_ssize_t index = 0; specs && index < PyTuple_GET_SIZE(tensors); index++) {
        static PyObject *name;
        PyObject *spec = (name || (name = PyUnicode_InternFromString("spec"))) ? PyObject_GetAttr(PyTuple_GET_ITEM(tensors, index), name) : NULL;
        if (!spec)
            Py_CLEAR(specs);
        else
            PyTuple_SET_ITEM(specs, index, spec);
    }
    int found = specs ? PySet_Contains(PyTuple_GET_ITEM(plan, A_fitting), specs) : 0;
    Py_XDECREF(specs);
    return found == 1;
}

static int add_ready(CommonCase *self, PyObject *node, PyObject *firing)
{
    PyObject *ready = self->of[P_ready], *firings = PyDict_GetItemWithError(ready, node), *done;
    if (firings) {
        done = PyObject_CallMethodOneArg(firings, S_append, firing);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    if (PyErr_Occurred())
        return -1;
    PyObject *alone = PyTuple_Pack(1, firing);
    firings = alone ? PyObject_CallOneArg(self->of[P_deque], alone) : NULL;
    int failed = !firings || PyDict_SetItem(ready, node, firings) < 0;
    Py_XDECREF(alone);
    Py_XDECREF(firings);
    return failed ? -1 : 0;
}

/* 1: the message was accepted; 0: it is not the common case; -1: an error. */
static int accept_common(CommonCase *self, PyObject *peer, PyObject *message)
{
    if ((PyObject *)Py_TYPE(message) != self->of[P_Message])
        return 0;
    PyObject *kind = FIELD(self, message, M_kind), *tag = FIELD(self, message, M_tag), *tensors = FIELD(self, message, M_tensors);
    if (!kind || !tag || !tensors || FIELD(self, message, M_header) != Py_None || (PyObject *)Py_TYPE(tag) != self->of[P_Tag] ||
        !PyTuple_CheckExact(tensors) || !is_text(kind, data_kind) || !is_false(self->of[P_fences], S_is_active))
        return 0;
    PyObject *plan = plan_of(self, self->arrivals, S_plan_arrival, FIELD(self, message, M_edge), FIELD(self, tag, T_layer));
    if (!plan)
        return 0;
    PyObject *inbound = PyTuple_GET_ITEM(plan, A_inbound);
    long received = attribute(inbound, S_received);
    if (received + 1 >= small(PyTuple_GET_ITEM(plan, A_size)) && attribute(inbound, S_consumed) != 0)
        return 0; /* credits that are held back go with this message */
    if (received < 0 || received >= small(PyTuple_GET_ITEM(plan, A_size)) || !is_text(peer, PyTuple_GET_ITEM(plan, A_peer)) ||
        !fits(self, plan, tag, tensors))
        return 0;
    Py_INCREF(plan);
    int failed = set_number(inbound, S_received, received + 1);
    PyObject *payload = failed ? NULL : PyObject_CallOneArg(PyTuple_GET_ITEM(plan, A_read), message);
    PyObject *inputs = payload ? PyDict_New() : NULL;
    failed = !inputs || PyDict_SetItem(inputs, PyTuple_GET_ITEM(plan, A_port), payload) < 0;
    PyObject *firing = NULL;
    if (!failed) {
        PyObject *fields[] = {PyTuple_GET_ITEM(plan, A_target), tag, inputs, PyTuple_GET_ITEM(plan, A_via)};
        firing = PyObject_Vectorcall(self->of[P_Firing], fields, 4, NULL);
        failed = !firing || add_ready(self, fields[0], firing) < 0;
    }
    Py_XDECREF(payload);
    Py_XDECREF(inputs);
    Py_XDECREF(firing);
    Py_DECREF(plan);
    return failed ? -1 : 1;
}

static PyObject *accept(CommonCase *self, PyObject *const *args, Py_ssize_t count)
{
    if (count == 2) {
        int done = accept_common(self, args[0], args[1]);
        if (done > 0)
            Py_RETURN_NONE;
        if (done < 0 || PyErr_Occurred())
            return NULL;
    }
    return PyObject_Vectorcall(self->of[P_slow_accept], args, (size_t)count, NULL);
}

/* --- a firing --- */

enum { R_reach, R_routes, NUM_FIRING };
enum { O_outbound, O_edge, O_edge_id, O_apply, O_to_message, O_max_bytes, O_sent, NUM_ROUTE };

/* The function has returned `results`, or raised: FusedSubgraph decides what follows. New reference, or NULL with an error. */
static PyObject *resume(CommonCase *self, PyObject *results)
{
    PyObject *error = NULL;
    if (!results) {
        PyObject *type, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        if (trace)
            PyException_SetTraceback(error, trace);
        Py_XDECREF(type);
        Py_XDECREF(trace);
    }
    PyObject *outputs = PyObject_CallMethodObjArgs(self->of[P_subgraph], S_resume, self->firing, results ? results : Py_None,
                                                   error ? error : Py_None, self->of[P_send_early], NULL);
    Py_XDECREF(error);
    return outputs;
}

/* The call that the compute seam makes: the function of the node, in inference mode. Leaves the outputs by port, if each is expected. */
static PyObject *call(PyObject *object, PyObject *const *args, size_t count, PyObject *names)
{
    CommonCase *self = (CommonCase *)object;
    if (PyVectorcall_NARGS(count) || names || !self->firing)
        return PyErr_Format(PyExc_TypeError, "only the compute seam calls this");
    PyObject *mode = PyObject_CallNoArgs(self->of[P_in_mode]), *entered;
    if (mode == Py_False) {
        Py_SETREF(mode, PyObject_CallOneArg(self->of[P_inference_mode], Py_True));
        if (!mode || !(entered = PyObject_CallMethodNoArgs(mode, S___enter__))) {
            Py_XDECREF(mode);
            return NULL;
        }
        Py_DECREF(entered);
    } else if (!mode)
        return NULL;
    PyObject *function = PyDict_GetItemWithError(self->of[P_functions], FIELD(self, self->firing, F_node));
    PyObject *batch = function ? PyTuple_Pack(1, self->firing) : NULL;
    PyObject *results = batch ? PyObject_CallOneArg(function, batch) : NULL;
    Py_XDECREF(batch);
    if (results && PyList_CheckExact(results) && PyList_GET_SIZE(results) == 1 && PyDict_CheckExact(PyList_GET_ITEM(results, 0))) {
        /* A copy: the operator may keep its own, and change it while Python runs here. */
        PyObject *outputs = PyDict_Copy(PyList_GET_ITEM(results, 0)), *port, *payload;
        Py_ssize_t next = 0;
        int expected = outputs != NULL;
        while (expected && PyDict_Next(outputs, &next, &port, &payload))
            expected = (PyObject *)Py_TYPE(payload) == self->of[P_Payload] && PyDict_Contains(self->routes, port) == 1;
        if (!expected)
            Py_CLEAR(outputs);
        self->outputs = outputs;
        PyErr_Clear();
    }
    PyObject *done = self->outputs ? Py_NewRef(Py_None) : NULL;
    if (!done)
        done = resume(self, results);
    Py_XDECREF(results);
    if (mode == Py_True) {
        Py_DECREF(mode);
        return done;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *left = PyObject_CallMethodObjArgs(mode, S___exit__, Py_None, Py_None, Py_None, NULL);
    Py_DECREF(mode);
    if (!left)
        Py_CLEAR(done);
    else
        PyErr_Restore(type, value, trace);
    Py_XDECREF(left);
    return done;
}

/* The bytes of the tensors of a payload; -1 with or without an error. */
static long bytes_of(PyObject *tensors)
{
    long total = 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tensors); index++) {
        PyObject *tensor = PyTuple_GET_ITEM(tensors, index);
        PyObject *number = PyObject_CallMethodNoArgs(tensor, S_numel), *size = number ? PyObject_GetAttr(tensor, S_itemsize) : NULL;
        long num = small(number), item = small(size);
        Py_XDECREF(number);
        Py_XDECREF(size);
        if (num < 0 || item < 0 || (item && num > (1L << 40) / item))
            return -1;
        total += num * item;
    }
    return total;
}

/* Gives an output to the interpreted method. */
static int emit(CommonCase *self, PyObject *method, PyObject *edge, PyObject *tag, PyObject *payload)
{
    PyObject *fields[] = {edge, tag, payload};
    PyObject *output = PyObject_Vectorcall(self->of[P_RoutedOutput], fields, 3, NULL);
    PyObject *done = output ? PyObject_CallMethodOneArg(self->of[P_runner], method, output) : NULL;
    Py_XDECREF(output);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int add_sent(PyObject *sent, long num_bytes)
{
    for (Py_ssize_t index = 0; index < 2; index++) {
        PyObject *sum = PyLong_FromLong(PyLong_AsLong(PyList_GET_ITEM(sent, index)) + (index ? num_bytes : 1));
        if (!sum || PyErr_Occurred() || PyList_SetItem(sent, index, sum) < 0)
            return -1;
    }
    return 0;
}

static int send_common(CommonCase *self, PyObject *route, PyObject *tag, PyObject *payload)
{
    PyObject *outbound = PyTuple_GET_ITEM(route, O_outbound), *edge = PyTuple_GET_ITEM(route, O_edge);
    PyObject *apply = PyTuple_GET_ITEM(route, O_apply), *tensors = FIELD(self, payload, Y_tensors);
    PyObject *stepped = apply == Py_None ? Py_NewRef(tag) : PyObject_CallOneArg(apply, tag);
    if (!stepped)
        return -1;
    int failed;
    long free = attribute(outbound, S_free), num_bytes = -1;
    PyObject *pending = PyObject_GetAttr(outbound, S_pending);
    if (free > 0 && pending && PyObject_Size(pending) == 0 && is_false(outbound, S_closed) && FIELD(self, payload, Y_header) == Py_None &&
        PyTuple_CheckExact(tensors))
        num_bytes = bytes_of(tensors);
    Py_XDECREF(pending);
    PyErr_Clear();
    if (!is_false(self->of[P_fences], S_is_active)) /* an output before this one could not be sent */
        failed = emit(self, S__emit_current, edge, stepped, payload);
    else if (num_bytes < 0 || num_bytes > small(PyTuple_GET_ITEM(route, O_max_bytes)))
        failed = emit(self, S__emit, edge, stepped, payload);
    else if (!(failed = set_number(outbound, S_free, free - 1))) {
        PyObject *fields[] = {payload, PyTuple_GET_ITEM(route, O_edge_id), stepped};
        PyObject *message = PyObject_Vectorcall(PyTuple_GET_ITEM(route, O_to_message), fields, 3, NULL);
        PyObject *arguments[] = {edge, message};
        PyObject *posted = message ? PyObject_Vectorcall(self->of[P_post], arguments, 2, NULL) : NULL;
        Py_XDECREF(message);
        if (posted)
            failed = add_sent(PyTuple_GET_ITEM(route, O_sent), num_bytes);
        else if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyObject *type, *error, *trace;
            PyErr_Fetch(&type, &error, &trace);
            PyErr_NormalizeException(&type, &error, &trace);
            PyObject *done = PyObject_CallMethodObjArgs(self->of[P_outbound], S__on_send_error, outbound, stepped, error, NULL);
            failed = done ? 0 : -1;
            Py_XDECREF(done);
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
        } else
            failed = -1;
        Py_XDECREF(posted);
    }
    Py_DECREF(stepped);
    return failed;
}

/* Counts the messages of a firing as consumed; where a credit may have to go back, the interpreted method does. */
static int consume(CommonCase *self, PyObject *firing)
{
    PyObject *via = FIELD(self, firing, F_via);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(via); index++) {
        PyObject *edge_id = PyTuple_GET_ITEM(via, index), *inbound = PyDict_GetItemWithError(self->of[P_inbound_edges], edge_id);
        if (!inbound) {
            if (PyErr_Occurred())
                return -1;
            continue;
        }
        long consumed = attribute(inbound, S_consumed), half = attribute(inbound, S_half);
        if (consumed >= 0 && consumed + 1 < half && attribute(inbound, S_received) < attribute(inbound, S_size)) {
            if (set_number(inbound, S_consumed, consumed + 1) < 0)
                return -1;
            continue;
        }
        PyObject *one = PyTuple_Pack(1, edge_id), *done = one ? PyObject_CallMethodOneArg(self->of[P_inbound], S_consume, one) : NULL;
        Py_XDECREF(one);
        Py_XDECREF(done);
        if (!done)
            return -1;
    }
    return 0;
}

static int count_call(CommonCase *self, PyObject *node, PyObject *start)
{
    PyObject *end = PyObject_CallNoArgs(self->of[P_now]), *seconds = end ? PyNumber_Subtract(end, start) : NULL, *one = PyLong_FromLong(1);
    PyObject *counts = seconds ? PyDict_GetItemWithError(self->of[P_nodes], node) : NULL, *done = NULL;
    int failed = 1;
    if (counts)
        failed = add_to(counts, S_num_calls, one) < 0 || add_to(counts, S_num_firings, one) < 0 ||
                 add_to(counts, S_compute_seconds, seconds) < 0 || add_to(counts, S_inline_seconds, seconds) < 0;
    else if (seconds && !PyErr_Occurred()) {
        done = PyObject_CallMethodObjArgs(self->of[P_statistics], S_add_call, node, one, seconds, Py_True, NULL);
        failed = !done;
    }
    Py_XDECREF(done);
    Py_XDECREF(end);
    Py_XDECREF(seconds);
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

/* Ends a firing whose outputs each have a route. */
static int finish_common(CommonCase *self, PyObject *firing, PyObject *plan, PyObject *outputs, PyObject *start)
{
    if (count_call(self, FIELD(self, firing, F_node), start) < 0)
        return -1;
    PyObject *port, *payload;
    Py_ssize_t next = 0;
    while (PyDict_Next(outputs, &next, &port, &payload)) {
        PyObject *routes = PyDict_GetItemWithError(PyTuple_GET_ITEM(plan, R_routes), port);
        if (!routes)
            return -1;
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(routes); index++)
            if (send_common(self, PyTuple_GET_ITEM(routes, index), FIELD(self, firing, F_tag), payload) < 0)
                return -1;
    }
    if (consume(self, firing) < 0)
        return -1;
    if (is_false(self->of[P_fences], S_is_active))
        return 0;
    PyObject *batch = PyTuple_Pack(1, firing), *done = batch ? PyObject_CallMethodOneArg(self->of[P_runner], S__end_fenced, batch) : NULL;
    Py_XDECREF(batch);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The routed outputs of a firing, for the interpreted method. */
static PyObject *routed(CommonCase *self, PyObject *firing, PyObject *plan, PyObject *outputs)
{
    PyObject *list = PyList_New(0), *port, *payload;
    Py_ssize_t next = 0;
    while (list && PyDict_Next(outputs, &next, &port, &payload)) {
        PyObject *routes = PyDict_GetItemWithError(PyTuple_GET_ITEM(plan, R_routes), port);
        for (Py_ssize_t index = 0; list && routes && index < PyTuple_GET_SIZE(routes); index++) {
            PyObject *route = PyTuple_GET_ITEM(routes, index), *apply = PyTuple_GET_ITEM(route, O_apply), *tag = FIELD(self, firing, F_tag);
            PyObject *stepped = apply == Py_None ? Py_NewRef(tag) : PyObject_CallOneArg(apply, tag);
            PyObject *fields[] = {PyTuple_GET_ITEM(route, O_edge), stepped, payload};
            PyObject *output = stepped ? PyObject_Vectorcall(self->of[P_RoutedOutput], fields, 3, NULL) : NULL;
            if (!output || PyList_Append(list, output) < 0)
                Py_CLEAR(list);
            Py_XDECREF(stepped);
            Py_XDECREF(output);
        }
    }
    return list;
}

/* Keeps an error, for `run` to raise; -1 for one that ends the process. */
static int keep_error(CommonCase *self)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    int failed = PyObject_SetAttr(self->of[P_runner], S__failure, error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return failed < 0 ? -1 : 2;
}

/* The call has raised: as `settle` does. */
static int end_failed(CommonCase *self, PyObject *batch, PyObject *start)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallMethodObjArgs(self->of[P_runner], S__end_failed, batch, error, start, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done ? 1 : keep_error(self);
}

/* Fires the first ready firing. 1: done; 0: it is not the common case, nothing has changed; 2: `run` will raise an error; -1: an error. */
static int fire_first(CommonCase *self)
{
    PyObject *ready = self->of[P_ready], *node, *firings;
    Py_ssize_t next = 0;
    if (!PyDict_Next(ready, &next, &node, &firings) || !is_false(self->of[P_fences], S_is_active))
        return 0;
    PyObject *firing = PySequence_GetItem(firings, 0);
    if (!firing)
        return -1;
    PyObject *plan = (PyObject *)Py_TYPE(firing) == self->of[P_Firing] && PyTuple_CheckExact(FIELD(self, firing, F_via)) &&
                             (PyObject *)Py_TYPE(FIELD(self, firing, F_tag)) == self->of[P_Tag]
                         ? plan_of(self, self->firings, S_plan_firing, node, FIELD(self, FIELD(self, firing, F_tag), T_layer))
                         : NULL;
    Py_DECREF(firing);
    if (!plan)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *reach = PyTuple_GET_ITEM(plan, R_reach);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(reach); index++)
        if (attribute(PyTuple_GET_ITEM(reach, index), S_free) < 1)
            return 0;
    PyObject *is_short = PyObject_CallOneArg(self->of[P_is_short], node);
    Py_XDECREF(is_short);
    if (is_short != Py_True)
        return is_short ? 0 : -1;
    if (PyObject_SetAttr(ready, S_wake_at, Py_None) < 0)
        return -1;

    Py_INCREF(node);
    Py_INCREF(firings);
    Py_INCREF(plan);
    int done = -1;
    PyObject *batch = NULL, *start = NULL, *result = NULL;
    firing = PyObject_CallMethodNoArgs(firings, S_popleft);
    if (!firing || PyDict_DelItem(ready, node) < 0 || (PyObject_Size(firings) && PyDict_SetItem(ready, node, firings) < 0))
        goto end;
    batch = PyList_New(1);
    start = PyObject_CallNoArgs(self->of[P_now]);
    if (!batch || !start)
        goto end;
    PyList_SET_ITEM(batch, 0, Py_NewRef(firing));
    self->firing = firing;
    self->routes = PyTuple_GET_ITEM(plan, R_routes);
    PyObject *arguments[] = {node, (PyObject *)self};
    result = PyObject_Vectorcall(self->of[P_run_inline], arguments, 2, NULL);
    PyObject *outputs = self->outputs;
    self->firing = self->routes = self->outputs = NULL;
    if (!result) {
        Py_XDECREF(outputs);
        done = end_failed(self, batch, start);
        goto end;
    }
    int failed;
    if (outputs && is_false(self->of[P_fences], S_is_active))
        failed = finish_common(self, firing, plan, outputs, start);
    else {
        PyObject *list = outputs ? routed(self, firing, plan, outputs) : Py_NewRef(result);
        PyObject *finished =
            list ? PyObject_CallMethodObjArgs(self->of[P_runner], S__finish, batch, list, start, Py_True, NULL) : NULL;
        failed = finished ? 0 : -1;
        Py_XDECREF(list);
        Py_XDECREF(finished);
    }
    Py_XDECREF(outputs);
    done = failed ? keep_error(self) : 1;
end:
    Py_XDECREF(batch);
    Py_XDECREF(start);
    Py_XDECREF(result);
    Py_XDECREF(firing);
    Py_DECREF(plan);
    Py_DECREF(firings);
    Py_DECREF(node);
    return done;
}

static PyObject *settle(CommonCase *self, PyObject *unused)
{
    PyObject *ready = self->of[P_ready], *failure;
    if (!PyDict_GET_SIZE(ready))
        Py_RETURN_NONE;
    failure = PyObject_GetAttr(self->of[P_runner], S__failure);
    Py_XDECREF(failure);
    if (failure != Py_None)
        return failure ? Py_NewRef(Py_None) : NULL;
    for (long left = self->max_inline; left > 0; left--) {
        int done = fire_first(self);
        if (done < 0 || PyErr_Occurred())
            return NULL;
        if (!done) {
            PyObject *number = PyLong_FromLong(left), *settled = number ? PyObject_CallOneArg(self->of[P_slow_settle], number) : NULL;
            Py_XDECREF(number);
            return settled;
        }
        if (done == 2)
            break;
        if (!PyDict_GET_SIZE(ready))
            Py_RETURN_NONE;
    }
    return PyObject_CallMethodNoArgs(self->of[P_runner], S__wake);
}

/* --- the object --- */

static PyObject *forget_plans(CommonCase *self, PyObject *unused)
{
    PyDict_Clear(self->arrivals);
    PyDict_Clear(self->firings);
    Py_RETURN_NONE;
}

static int traverse(CommonCase *self, visitproc visit, void *arg)
{
    for (int part = 0; part < NUM_PARTS; part++)
        Py_VISIT(self->of[part]);
    Py_VISIT(self->arrivals);
    Py_VISIT(self->firings);
    Py_VISIT(self->outputs);
    return 0;
}

static int clear(CommonCase *self)
{
    for (int part = 0; part < NUM_PARTS; part++)
        Py_CLEAR(self->of[part]);
    Py_CLEAR(self->arrivals);
    Py_CLEAR(self->firings);
    Py_CLEAR(self->outputs);
    return 0;
}

static void dealloc(CommonCase *self)
{
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != NUM_PARTS + 1 || (kwargs && PyDict_GET_SIZE(kwargs)))
        return PyErr_Format(PyExc_TypeError, "%d arguments expected", NUM_PARTS + 1);
    long max_inline = PyLong_AsLong(PyTuple_GET_ITEM(args, NUM_PARTS));
    if (max_inline == -1 && PyErr_Occurred())
        return NULL;
    CommonCase *self = (CommonCase *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = call;
    self->max_inline = max_inline;
    for (int part = 0; part < NUM_PARTS; part++)
        self->of[part] = Py_NewRef(PyTuple_GET_ITEM(args, part));
    self->arrivals = PyDict_New();
    self->firings = PyDict_New();
    int failed = !self->arrivals || !self->firings;
    for (int field = 0; field < NUM_FIELDS && !failed; field++) {
        PyObject *member = PyObject_GetAttrString(self->of[FIELDS[field].part], FIELDS[field].name);
        failed = !member || Py_TYPE(member) != &PyMemberDescr_Type || ((PyMemberDescrObject *)member)->d_member->type != T_OBJECT_EX;
        if (!failed)
            self->at[field] = ((PyMemberDescrObject *)member)->d_member->offset;
        else if (member)
            PyErr_Format(PyExc_TypeError, "%s is not a field of a struct", FIELDS[field].name);
        Py_XDECREF(member);
    }
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef methods[] = {
    {"accept", (PyCFunction)(void (*)(void))accept, METH_FASTCALL, "accept(peer, message): as Runner.accept."},
    {"settle", (PyCFunction)settle, METH_NOARGS, "settle(): as Runner.settle."},
    {"forget_plans", (PyCFunction)forget_plans, METH_NOARGS, "forget_plans(): the graph has changed."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CommonCaseType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.dataflow._common_case.CommonCase",
    .tp_doc = "CommonCase(*parts of a runner, at most so many firings in a row): its `accept` and `settle` are those of the runner.",
    .tp_basicsize = sizeof(CommonCase),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = new,
    .tp_dealloc = (destructor)dealloc,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_methods = methods,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(CommonCase, vectorcall),
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flowrt.dataflow._common_case",
    .m_doc = "The commonest case of a runner. See Runner.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__common_case(void)
{
#define INTERN(name)                                                                                                                  \
    if (!(S_##name = PyUnicode_InternFromString(#name)))                                                                               \
        return NULL;
    FOR_NAMES(INTERN)
    if (!(data_kind = PyUnicode_InternFromString("data")))
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (self && PyModule_AddType(self, &CommonCaseType) < 0)
        Py_CLEAR(self);
    return self;
}
