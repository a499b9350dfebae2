"""The report as one HTML file: chart and tables that work offline, and tables without scripts."""

from jaxmem.show.page.document import document as document
from jaxmem.show.page.document import write_page as write_page
